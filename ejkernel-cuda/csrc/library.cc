// The versions that the library was built with. Python compares them before it registers a handler.
#include "export.h"
#include "xla/ffi/api/c_api.h"

EJKERNEL_EXPORT const char* ejkernel_cuda_version() { return EJKERNEL_CUDA_VERSION; }

EJKERNEL_EXPORT int ejkernel_cuda_ffi_major() { return XLA_FFI_API_MAJOR; }

EJKERNEL_EXPORT int ejkernel_cuda_ffi_minor() { return XLA_FFI_API_MINOR; }
