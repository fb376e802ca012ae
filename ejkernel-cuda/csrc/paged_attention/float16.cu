// paged_attention of queries of float16.
#include "paged_attention/launch.cuh"

namespace ejkernel::paged_attention {

template ffi::Error Run<__half>(cudaStream_t, ffi::DataType, const Problem&, const Results&, Knobs);

}  // namespace ejkernel::paged_attention
