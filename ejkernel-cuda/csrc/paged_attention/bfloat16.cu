// paged_attention of queries and pages of bfloat16.
#include "paged_attention/launch.cuh"

namespace ejkernel::paged_attention {

template ffi::Error Attend<__nv_bfloat16, __nv_bfloat16>(cudaStream_t, const Problem&, const Results&, Knobs, int&);

}  // namespace ejkernel::paged_attention
