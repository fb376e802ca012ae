// paged_attention of pages of one-byte types.
#include "paged_attention/launch.cuh"

namespace ejkernel::paged_attention {

template ffi::Error Attend<__half, Int8>(cudaStream_t, const Problem&, const Results&, Knobs, int&);
template ffi::Error Attend<__half, E4M3>(cudaStream_t, const Problem&, const Results&, Knobs, int&);
template ffi::Error Attend<__half, E5M2>(cudaStream_t, const Problem&, const Results&, Knobs, int&);

}  // namespace ejkernel::paged_attention
