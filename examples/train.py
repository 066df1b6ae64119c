"""Trains four small nets over scikit-learn's digits in Spark, and replays the best one."""

import pandas as pd
import torch
from sklearn.datasets import load_digits

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, SparkEstimator, hp_choice


def estimator_gen_fn(params):
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    )
    return SparkEstimator(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=params["lr"]),  # an instance
        loss=torch.nn.CrossEntropyLoss(),
        metrics=["accuracy"],  # or {name: (function, "min" | "max")}
        batch_size=params["batch_size"],
        shards=3,  # a number, or module names to cut at
    )


def main():
    spark = cerebro_hydra.local_spark(workers=2)  # or your own session
    pixels, labels = load_digits(return_X_y=True)
    rows = pd.DataFrame({"features": list(pixels.astype("float32") / 16), "label": labels})
    df = spark.createDataFrame(rows, "features array<float>, label long")

    search = GridSearch(
        backend=SparkBackend(spark_context=spark.sparkContext, num_workers=2),
        store=LocalStore("cerebro"),  # data and runs; a folder that every worker sees
        estimator_gen_fn=estimator_gen_fn,
        search_space={"lr": hp_choice([1e-2, 1e-3]), "batch_size": hp_choice([32, 64])},
        num_epochs=3,
        evaluation_metric="accuracy",
        validation=0.2,
        feature_columns=["features"],
        label_columns=["label"],
        order="dynamic",  # "seeded" gives the same bits in every run
    )
    result = search.fit(df)

    print(result.get_best_model_history())  # {"train_loss": [...], "val_accuracy": [...], ...}
    print(result.to_pandas())  # parameters, status and metrics of every trial
    result.set_output_columns(["logits"]).transform(df).show(3)
    net = result.get_best_model().torch()  # a plain nn.Module
    print(net(torch.from_numpy(pixels[:1] / 16).float()).argmax(1), labels[0])

    best = result.best_trial.trial_id
    print(best, "identical:", cerebro_hydra.replay(result.run_path, best).identical)


if __name__ == "__main__":  # agents import this file to find estimator_gen_fn
    main()
