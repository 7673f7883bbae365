"""The public sources of CANN's operators in which limits were read that no page states."""

_TRANSFORMER = "cannmirror/ops-transformer 05c401f9"
_NN = "hicann/ops-nn e5c3fa93"

BNSD_SKIP = (
    f"{_TRANSFORMER}, posembedding/rotary_position_embedding/op_host/rope_rotate_half_tiling.cpp, CheckBnsdBlockSkip"
)
ROTARY_WIDTH = (
    f"{_TRANSFORMER}, posembedding/rotary_position_embedding/op_host/rope_regbase_tiling_base.cpp, "
    "CheckRotaryModeShapeRelation"
)
ROTARY_GRADIENT = f"{_TRANSFORMER}, posembedding/rotary_position_embedding_grad/op_host/rope_half_grad_tiling.cpp"
NORM_GRADIENT = f"{_NN}, norm/rms_norm_grad/op_host/rms_norm_grad_tiling.cpp, Tiling4RmsNormGrad"
CLIPPED = f"{_NN}, activation/clipped_swiglu/op_host/clipped_swiglu_tiling_arch35.cpp"
UNPERMUTE = f"{_TRANSFORMER}, moe/moe_token_unpermute/op_kernel/moe_token_unpermute.h"
UNPERMUTE_GRADIENT = f"{_TRANSFORMER}, moe/moe_token_unpermute_grad/op_host/moe_token_unpermute_grad_tiling.cpp"
GROUPED = f"{_TRANSFORMER}, gmm/grouped_matmul/op_host/op_api/aclnn_grouped_matmul.cpp"
TRANSPOSED = f"{_TRANSFORMER}, gmm/grouped_matmul/op_host/op_api/aclnn_grouped_matmul_util.cpp, IsTransposeLastTwoDims"
GROUPED_950 = f"{GROUPED}, CheckNonQuantMatmulDataType"
LISTED_950 = f"{_TRANSFORMER}, gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md, Ascend 950PR"
