"""Architectures of transformers, in small configurations with random weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from integration.zoo.architecture import (
    BARE_SENTENCES,
    CLASSES,
    SENTENCE_PAIRS,
    SENTENCES,
    TEXT,
    WORDS,
    Architecture,
    Task,
    images,
    sounds,
    spectra,
)

WIDTH, LAYERS, HEADS = 16, 3, 2

_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SEQ2SEQ = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": 2,
}
_T5 = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 2 * WIDTH,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": HEADS,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_IMAGE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "image_size": 16,
    "patch_size": 8,
}
_SOUND = {
    **_SIZES,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 3),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "mask_time_length": 2,
}


def _architecture(model_type: str, head: str, task: Task, **config: Any) -> Architecture:
    def build() -> nn.Module:
        import transformers

        head_class = getattr(transformers, f"AutoModelFor{head}")
        made = transformers.AutoConfig.for_model(model_type, **config)
        model: nn.Module = head_class.from_config(made)
        return model

    return Architecture(model_type, "transformers", task, build)


def _encoder(model_type: str, task: Task = SENTENCES, **config: Any) -> Architecture:
    sizes = {**_SIZES, "num_labels": CLASSES, **config}
    given = {name: value for name, value in sizes.items() if value is not None}
    return _architecture(model_type, "SequenceClassification", task, **given)


def _decoder(model_type: str, **config: Any) -> Architecture:
    return _architecture(model_type, "CausalLM", TEXT, **{**_SIZES, **config})


def _seq2seq(model_type: str, **config: Any) -> Architecture:
    return _architecture(model_type, "Seq2SeqLM", SENTENCE_PAIRS, **config)


def _image(model_type: str, size: int = 16, **config: Any) -> Architecture:
    sizes = {"num_labels": CLASSES, **config}
    return _architecture(model_type, "ImageClassification", images(size), **sizes)


def _sound(model_type: str, task: Task, **config: Any) -> Architecture:
    sizes = {"num_labels": CLASSES, **config}
    return _architecture(model_type, "AudioClassification", task, **sizes)


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

ARCHITECTURES = (
    _encoder("albert", embedding_size=8, num_hidden_groups=2),
    _encoder("bert"),
    _encoder("big_bird", attention_type="original_full"),
    _encoder("convbert", embedding_size=WIDTH, head_ratio=1),
    _encoder("deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _encoder("deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _encoder("distilbert"),
    _encoder("fnet", BARE_SENTENCES),
    _encoder("funnel", block_sizes=[1, 1, 1], d_model=WIDTH, n_head=HEADS, d_head=8, d_inner=32,
             num_hidden_layers=None),
    _encoder("longformer", attention_window=4, max_position_embeddings=40),
    _encoder("modernbert", global_attn_every_n_layers=2, local_attention=8),
    _encoder("roberta", max_position_embeddings=40),
    _encoder("squeezebert", embedding_size=WIDTH),
    _encoder("xlnet", d_model=WIDTH, n_layer=LAYERS, n_head=HEADS, d_inner=2 * WIDTH,
             max_position_embeddings=None),
    _decoder("bloom"),
    _decoder("deepseek_v3", num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2,
             moe_intermediate_size=16, n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=8,
             qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, first_k_dense_replace=1),
    _decoder("falcon"),
    _decoder("gemma", num_key_value_heads=1, head_dim=8),
    _decoder("gemma2", num_key_value_heads=1, head_dim=8, sliding_window=4),
    _decoder("gpt2"),
    _decoder("gpt_neo", attention_types=[[["global", "local"], 2]], num_hidden_layers=4),
    _decoder("gpt_neox"),
    _decoder("gptj", rotary_dim=4),
    _decoder("llama", num_key_value_heads=1),
    _decoder("mamba", state_size=4),
    _decoder("mistral", num_key_value_heads=1, sliding_window=4),
    _decoder("mixtral", num_key_value_heads=1, num_local_experts=4),
    _decoder("mpt", d_model=WIDTH, n_heads=HEADS, n_layers=LAYERS, max_seq_len=32),
    _decoder("olmo", num_key_value_heads=1),
    _decoder("opt", ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH, layerdrop=0.3),
    _decoder("phi", num_key_value_heads=1),
    _decoder("phi3", num_key_value_heads=1),
    _decoder("qwen2", num_key_value_heads=1),
    _decoder("qwen2_moe", num_key_value_heads=1, shared_expert_intermediate_size=16, **_EXPERTS),
    _decoder("qwen3", num_key_value_heads=1, head_dim=8),
    _seq2seq("bart", **_SEQ2SEQ),
    _seq2seq("longt5", **_T5, local_radius=3),
    _seq2seq("marian", **_SEQ2SEQ),
    _seq2seq("switch_transformers", **_T5, num_experts=2, num_sparse_encoder_layers=1,
             num_sparse_decoder_layers=1),
    _seq2seq("t5", **_T5),
    _image("cvt", 32, embed_dim=[8, 8, 16], num_heads=[1, 1, 2], depth=[1, 2, 3]),
    _image("dinov2", **_IMAGE),
    _image("mobilevit", 32, hidden_sizes=[8, 12, 16], neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16],
           image_size=32, num_attention_heads=2),
    _image("segformer", 32, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_encoder_blocks=4,
           num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16),
    _image("vit", **_IMAGE),
    _sound("audio-spectrogram-transformer", spectra("input_values", 24, 16), **{
        **_IMAGE, "patch_size": 8, "max_length": 24, "num_mel_bins": 16}),
    _sound("wav2vec2", sounds(400), **_SOUND),
    _sound("whisper", spectra("input_features", 8, 32), **{
        **_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "classifier_proj_size": 8}),
)  # fmt: skip

BY_TYPE = {each.name: each for each in ARCHITECTURES}
