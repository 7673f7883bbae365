"""Exceptions to the rules of `small_configs`, by model type, and what else a model must be given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

_FIVE = int(transformers.__version__.split(".")[0]) >= 5
_ROPE = "rope_parameters" if _FIVE else "rope_scaling"
_MROPE = {_ROPE: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_HALF_MROPE = {_ROPE: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_INTERLEAVED_MROPE = {_ROPE: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}}
_CODEC = {"num_filters": 8, "upsampling_ratios": [4, 2], "upsample_groups": 64}
_VQ = {"base_channels": 32, "channel_multiplier": [1, 1], "attn_resolutions": [], "num_res_blocks": 1}
_VISION = {"model_type": "vit"}
_NARROW_TOKENIZER = {"num_filters": 4, "depths": [1] * 4, "downsampling_ratios": [2, 2, 2]}
_BIGVGAN = {
    "upsample_initial_channel": 64,
    "upsample_rates": [2, 2],
    "upsample_kernel_sizes": [4, 4],
}
_ATOMS = {"num_spatial_rope_pairs_per_axis": 2, "num_uid_rope_pairs": 2, "output_dim": 64}
_SAM3_FEATURES = {"vision_config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}}
_FOUR_STAGES = {
    "num_hidden_layers": 4,
    "out_indices": [1, 2, 3, 4],
    "reshape_hidden_states": False,
}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": 2, "encoder_hash_byte_group_vocab": 64},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "chameleon_vqgan": _VQ,
    "clvp_encoder": {"num_attention_heads": 2},
    "cohere2_moe": {"num_shared_experts": 1, "rms_norm_eps": 1e-6},
    "cohere_compass_text": {_ROPE: dict.fromkeys(("full_attention", "sliding_attention"), _MROPE[_ROPE])},
    "dac": {"encoder_hidden_size": 8, "decoder_hidden_size": 64, "downsampling_ratios": [4, 2]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2_sam_vision_model": {"output_channels": 64, "downsample_channels": [64, 64]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "depth_anything": {"backbone_config": _FOUR_STAGES, "reassemble_hidden_size": 64},
    "diffusion_gemma_text": {"global_head_dim": 32, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 32},
    "dots3_note_text": {
        f"swa_{name}": value
        for name, value in {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "head_dim": 32,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        }.items()
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64, "pyramid_num_routed": [-1, 4]},
    "efficientloftr": {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8},
    "embedding_gemma2_text": {"global_head_dim": 32},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "emu3_vqgan": _VQ,
    "ernie4_5_vl_moe_text": {**_INTERLEAVED_MROPE, "moe_intermediate_size": [32, 32]},
    "esm": {"vocab_size": 256, "position_embedding_type": "rotary"},
    "esmc": {"vocab_size": 256, "num_key_value_heads": 4},
    "esmfold2": {
        "single_inputs_size": 131,
        "atom_encoder": _ATOMS,
        "structure_head": {"diffusion_module": {"atom_encoder": _ATOMS}},
    },
    "falcon_h1": {"mamba_rms_norm": True},
    "gemma4_text": {
        "global_head_dim": 32,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "glm46v_text": _MROPE,
    "glm4v_moe_text": _HALF_MROPE,
    "glm4v_text": _MROPE,
    "Glm4vMoe_text": _HALF_MROPE,
    "glm_image_text": _MROPE,
    "glm_ocr_text": _MROPE,
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 64}},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "1/2",
        "qformer_config": {"num_attention_heads": 4},
    },
    "granitemoe_swa": {"shared_intermediate_size": 96},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] if _FIVE else ["mamba", "attention"],
        "position_embedding_type": "rope",
    },
    "granitemoeshared": {"shared_intermediate_size": 96},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hunyuan_vl_text": {_ROPE: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]}},
    "inkling_vision": {"patch_size": 2, "text_hidden_size": 64},
    "internvl_vision": {"norm_type": "rms_norm", "use_qk_norm": True},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_vision_model": {"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64},
    "longcat_flash": {"zero_expert_num": 2},
    "longt5": {"feed_forward_proj": "gated-gelu"},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "mimi": _CODEC,
    "mimi_decoder": _CODEC,
    "mimi_encoder": _CODEC,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "mistral_large4_text": {"kv_source_layers": [0, 1, 2]},
    "mllama_text_model": {
        "num_hidden_layers": 3,
        "cross_attention_layers": [1],
        _ROPE: {"rope_type": "default", "rope_theta": 1e4},
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, 0]}},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark_audio": {
        "patch_sizes": [16, 6],
        "hidden_sizes": [32, 64],
        "depths": [1, 1],
        "num_hidden_layers": 2,
        "out_hidden_size": 64,
    },
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "neucodec": {"encoder_hidden_size": 4},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "paddleocr_vl_text": _MROPE,
    "pe_video_encoder": {"vision_config": _VISION},
    "perception_lm": {"vision_config": _VISION},
    "phi4_multimodal": {
        "audio_config": {"hidden_size": 64, "intermediate_size": 96, "num_blocks": 2, "num_attention_heads": 4},
        "vision_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    },
    "pix2struct_text_model": {"initializer_range": 0.02},
    "pocket_tts": {"flow_head_config": {"condition_dim": 64}},
    "pocket_tts_audio_tokenizer": _CODEC,
    "pocket_tts_audio_tokenizer_decoder": _CODEC,
    "pocket_tts_audio_tokenizer_encoder": _CODEC,
    "prompt_depth_anything": {"backbone_config": _FOUR_STAGES, "reassemble_hidden_size": 64},
    "qianfan_ocr_vision": {"norm_type": "rms_norm", "use_qk_norm": True},
    "qwen2_5_omni_bigvgan": _BIGVGAN,
    "qwen2_5_omni_talker": _MROPE,
    "qwen2_5_omni_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen3_omni_moe": {
        "talker_config": {"spatial_merge_size": 2},
        "code2wav_config": {"decoder_dim": 64, "upsample_rates": (4, 2)},
    },
    "qwen3_omni_moe_talker_text": {**_INTERLEAVED_MROPE, "shared_expert_intermediate_size": 32},
    "qwen3_omni_moe_text": _INTERLEAVED_MROPE,
    "qwen3_vl_moe_text": _INTERLEAVED_MROPE,
    "qwen3_vl_text": _INTERLEAVED_MROPE,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "blocks_per_stage": [1, 1, 1, 1],
        "embed_dim_per_stage": [16, 32, 64, 128],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "global_attention_blocks": [2],
    },
    "sam2_vision_model": {"backbone_channel_list": [128, 64, 32, 16]},
    "sam3_tracker": _SAM3_FEATURES,
    "sam3_tracker_video": {**_SAM3_FEATURES, "image_size": 32},
    "seamless_m4t": {"position_embeddings_type": "rotary"},
    "shieldgemma2": {"yes_token_index": 3, "no_token_index": 4},
    "step3p5": {"sliding_window": 8},
    "step3p7_text": {"sliding_window": 8},
    "t5": {"feed_forward_proj": "gated-gelu"},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "udop": {"feed_forward_proj": "gated-gelu"},
    "vibevoice_acoustic_tokenizer": _NARROW_TOKENIZER,
    "vibevoice_acoustic_tokenizer_decoder": _NARROW_TOKENIZER,
    "vibevoice_acoustic_tokenizer_encoder": _NARROW_TOKENIZER,
    "vjepa2": {"crop_size": 32, "frames_per_clip": 4},
    "xcodec2": {"encoder_hidden_size": 4},
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {
        "num_hidden_layers": 5,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        **({"layers_block_type": None} if _FIVE else {}),
    },
}
"""By model type, also of a config within another: arguments for which the rules of `small_config` do not hold."""
