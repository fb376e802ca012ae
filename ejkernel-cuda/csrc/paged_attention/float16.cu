// paged_attention of queries and pages of float16.
#include "paged_attention/launch.cuh"

namespace ejkernel::paged_attention {

template ffi::Error Attend<__half, __half>(cudaStream_t, const Problem&, const Results&, Knobs, int&);

}  // namespace ejkernel::paged_attention
