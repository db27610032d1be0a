# SPDX-License-Identifier: Apache-2.0
"""Krill's config.json: V4.1 in every branch, small enough to ship."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from training.prepare import BOS_ID, EOS_ID, IMAGE_ID, NOISE_ID, PAD_ID, VOCAB_SIZE
from whalefall.models.deepseek_v41.engram_tables import compressed_vocab, table_primes

NUM_DRAFT_BLOCKS = 2
ENGRAM_LAYERS, NGRAM, ENGRAM_HEADS, ENGRAM_VOCAB = [1, 3], 4, 2, 3500


def krill_config(tokenizer: Tokenizer) -> dict[str, Any]:
    primes = table_primes(ENGRAM_VOCAB, len(ENGRAM_LAYERS), NGRAM, ENGRAM_HEADS)
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "image_token_id": IMAGE_ID,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8",
            "expert_dtype": "fp4",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
        },
        "text_config": {
            "model_type": "deepseek_v41_text",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "qk_rope_head_dim": 32,
            "q_lora_rank": 128,
            "o_groups": 4,
            "o_lora_rank": 32,
            "hidden_act": "silu",
            "moe_intermediate_size": 64,
            "n_routed_experts": 18,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "rms_norm_eps": 1e-20,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "tie_word_embeddings": False,
            "max_position_embeddings": 8192,
            "rope_theta": 10000,
            "compress_rope_theta": 160000,
            "rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 2048},
            "sliding_window": 128,
            "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, *[0] * NUM_DRAFT_BLOCKS],
            "kv_source_layer_ids": [1, 3, 4],
            "index_source_layer_ids": [1, 3, 4, 6],
            "index_n_heads": 4,
            "index_head_dim": 64,
            "index_topk": 128,
            "candidate_source_layer_id": 4,
            "candidate_topk_blocks": 64,
            "candidate_block_size": 8,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "engram_layer_ids": ENGRAM_LAYERS,
            "engram_num_embeddings": [sum(layer) for layer in primes],
            "engram_max_ngram_size": NGRAM,
            "engram_n_heads": ENGRAM_HEADS,
            "engram_head_dim": 32,
            "engram_vocab_size": ENGRAM_VOCAB,
            "engram_pad_token_id": PAD_ID,
            "engram_compressed_vocab_size": compressed_vocab(tokenizer, VOCAB_SIZE).count,
            "num_nextn_predict_layers": NUM_DRAFT_BLOCKS,
            "dspark_block_size": 5,
            "dspark_noise_token_id": NOISE_ID,
            "dspark_target_layer_ids": [5, 6, 7],
            "dspark_markov_rank": 32,
            "dspark_n_routed_experts": 8,
            "dspark_num_experts_per_tok": 3,
        },
    }
