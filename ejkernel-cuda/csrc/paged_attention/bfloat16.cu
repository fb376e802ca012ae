// paged_attention of queries of bfloat16.
#include "paged_attention/launch.cuh"

namespace ejkernel::paged_attention {

template ffi::Error Run<__nv_bfloat16>(cudaStream_t, ffi::DataType, const Problem&, const Results&, Knobs);

}  // namespace ejkernel::paged_attention
