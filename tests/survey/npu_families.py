"""Model families by the names that people use, and the types that training frameworks patch for NPUs by name."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """One row of the page.

    Attributes:
        name: The name that people use.
        model_type: As in its ``config.json``.
        model_class: The class that is trained; ``docs/losses.md`` has its status unless its loss is fused.
    """

    name: str
    model_type: str
    model_class: str


class Patches(NamedTuple):
    """The patches of a framework for NPUs, as read in its code; none was run.

    Attributes:
        framework: Its name.
        source: Repository, file and commit.
        date: The date of the commit.
        model_types: The types that the framework names, as far as they were noted one by one.
        english: The patched operations and classes, in English.
        chinese: The same in Chinese.
    """

    framework: str
    source: str
    date: str
    model_types: tuple[str, ...]
    english: str
    chinese: str


FAMILIES = tuple(
    Family(*row.split(" | "))
    for row in """\
Qwen2, Qwen2.5 | qwen2 | Qwen2ForCausalLM
Qwen2-MoE | qwen2_moe | Qwen2MoeForCausalLM
Qwen2-VL | qwen2_vl | Qwen2VLForConditionalGeneration
Qwen2.5-VL | qwen2_5_vl | Qwen2_5_VLForConditionalGeneration
Qwen2.5-Omni, thinker | qwen2_5_omni_thinker | Qwen2_5OmniThinkerForConditionalGeneration
Qwen3 | qwen3 | Qwen3ForCausalLM
Qwen3-MoE | qwen3_moe | Qwen3MoeForCausalLM
Qwen3-VL | qwen3_vl | Qwen3VLForConditionalGeneration
Qwen3-VL-MoE | qwen3_vl_moe | Qwen3VLMoeForConditionalGeneration
Qwen3-Omni, thinker | qwen3_omni_moe_thinker | Qwen3OmniMoeThinkerForConditionalGeneration
Qwen3-ASR | qwen3_asr | Qwen3ASRForConditionalGeneration
Qwen3-Next | qwen3_next | Qwen3NextForCausalLM
Qwen3.5 | qwen3_5 | Qwen3_5ForConditionalGeneration
Qwen3.5-MoE | qwen3_5_moe | Qwen3_5MoeForConditionalGeneration
DeepSeek-V2 | deepseek_v2 | DeepseekV2ForCausalLM
DeepSeek-V3, R1 | deepseek_v3 | DeepseekV3ForCausalLM
DeepSeek-V3.2 | deepseek_v32 | DeepseekV32ForCausalLM
DeepSeek-V4 | deepseek_v4 | DeepseekV4ForCausalLM
GLM-4-9B | glm | GlmForCausalLM
GLM-4-0414 | glm4 | Glm4ForCausalLM
GLM-4.1V | glm4v | Glm4vForConditionalGeneration
GLM-4.5 | glm4_moe | Glm4MoeForCausalLM
GLM-4.5V | glm4v_moe | Glm4vMoeForConditionalGeneration
GLM-4.6V | glm46v | Glm46VForConditionalGeneration
GLM-4.7-Flash | glm4_moe_lite | Glm4MoeLiteForCausalLM
GLM-5 | glm_moe_dsa | GlmMoeDsaForCausalLM
GLM-5.3-Flash | glm5_next | Glm5NextForConditionalGeneration
GLM-OCR | glm_ocr | GlmOcrForConditionalGeneration
Kimi-Linear | kimi_linear | KimiLinearForCausalLM
Kimi-K2.5, K2.6 | kimi_k25 | Kimi_K25ForConditionalGeneration
InternVL3 (-hf) | internvl | InternVLForConditionalGeneration
MiniCPM3 | minicpm3 | MiniCPM3ForCausalLM
MiniCPM-V 4.6 | minicpmv4_6 | MiniCPMV4_6ForConditionalGeneration
MiniCPM-V 4.7 | minicpmv4_7 | MiniCPMV4_7ForConditionalGeneration
MiniMax-Text-01 (-hf) | minimax | MiniMaxForCausalLM
MiniMax-M2 | minimax_m2 | MiniMaxM2ForCausalLM
MiniMax-M3 | minimax_m3_vl | MiniMaxM3SparseForConditionalGeneration
Hunyuan, dense | hunyuan_v1_dense | HunYuanDenseV1ForCausalLM
Hunyuan, MoE | hunyuan_v1_moe | HunYuanMoEV1ForCausalLM
HunyuanVL | hunyuan_vl | HunYuanVLForConditionalGeneration
Hy3 | hy_v3 | HYV3ForCausalLM
Hy4 | hy_v4 | HYV4ForCausalLM
ERNIE 4.5 | ernie4_5 | Ernie4_5ForCausalLM
ERNIE 4.5, MoE | ernie4_5_moe | Ernie4_5_MoeForCausalLM
ERNIE 4.5 VL | ernie4_5_vl_moe | Ernie4_5_VLMoeForConditionalGeneration
PaddleOCR-VL | paddleocr_vl | PaddleOCRVLForConditionalGeneration
Seed-OSS | seed_oss | SeedOssForCausalLM
Ling-3.0-Flash | bailing_hybrid | BailingHybridForCausalLM
LongCat-Flash | longcat_flash | LongcatFlashForCausalLM
MiMo-V2-Flash | mimo_v2_flash | MiMoV2FlashForCausalLM
dots.llm1 | dots1 | Dots1ForCausalLM
Ovis2 | ovis2 | Ovis2ForConditionalGeneration
Llama 2, 3 | llama | LlamaForCausalLM
Llama 4 | llama4 | Llama4ForConditionalGeneration
Mistral | mistral | MistralForCausalLM
Mixtral | mixtral | MixtralForCausalLM
Gemma | gemma | GemmaForCausalLM
Gemma 2 | gemma2 | Gemma2ForCausalLM
Gemma 3 | gemma3 | Gemma3ForConditionalGeneration
Gemma 4 | gemma4 | Gemma4ForConditionalGeneration
gpt-oss | gpt_oss | GptOssForCausalLM
Phi-3, Phi-4 | phi3 | Phi3ForCausalLM""".splitlines()
)

PATCHES = (
    Patches(
        "LLaMA-Factory",
        "hiyouga/LLaMA-Factory, src/llamafactory/v1/plugins/model_plugins/kernels, ff6d4d12e",
        "2026-08-18",
        (),
        "RMSNorm, SwiGLU and RoPE of 9 types, all of the Qwen3 family; MoE of 6 types with transformers 5, 5 with 4",
        "9 个类型的 RMSNorm、SwiGLU、RoPE，均属 Qwen3 系列；MoE：transformers 5 下 6 个类型，4 下 5 个",
    ),
    Patches(
        "ms-swift",
        "modelscope/ms-swift, swift/model/npu_patch/model.py, 3602360a5",
        "2026-08-22",
        ("qwen2", "qwen3", "qwen3_moe", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        "RMSNorm, SwiGLU, RoPE and MoE in 6 modeling modules",
        "6 个 modeling 模块中的 RMSNorm、SwiGLU、RoPE、MoE",
    ),
    Patches(
        "verl",
        "verl-project/verl, verl/models/transformers/npu_patch.py, 1dda039b9",
        "2026-08-22",
        (
            "qwen2",
            "qwen2_5_vl",
            "qwen3",
            "qwen3_moe",
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen3_next",
            "qwen3_5",
            "qwen3_5_moe",
        ),
        "RMSNorm, SwiGLU, RoPE and MoE of 9 Qwen types",
        "9 个 Qwen 类型的 RMSNorm、SwiGLU、RoPE、MoE",
    ),
)
"""A type is listed if any of its operations is patched; which operations of a type are patched was not noted."""
