// Symbols of add_rms_norm.
#include "norm/handlers.cuh"

namespace ejkernel::norm {

using Here = Handlers<false, true>;

EJKERNEL_HANDLER(ejkernel_cuda_add_rms_norm_forward, Here::BindForward, Here::RunForward, Here::CheckForward)
EJKERNEL_HANDLER(ejkernel_cuda_add_rms_norm_backward, Here::BindBackward, Here::RunBackward, Here::CheckBackward)

}  // namespace ejkernel::norm
