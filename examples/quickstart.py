import pandas as pd
from sklearn.datasets import load_digits
from torch import nn, optim

import cerebro_hydra as ch


def build(params):
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return ch.SparkEstimator(net, optim.AdamW(net.parameters(), **params), nn.CrossEntropyLoss())


if __name__ == "__main__":  # workers import this file
    rows = pd.DataFrame(zip(*load_digits(return_X_y=True)), columns=["features", "label"])
    backend, store = ch.SparkBackend(ch.local_spark(workers=2)), ch.LocalStore("cerebro")
    space = {"lr": ch.hp_choice([1e-2, 1e-3])}
    search = ch.GridSearch(
        backend=backend, store=store, estimator_gen_fn=build, search_space=space, num_epochs=3
    )
    print(search.fit(rows).get_best_model_history())  # {"train_loss": [...], "val_loss": [...]}
