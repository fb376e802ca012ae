// What a kernel for compute capability 9.0 alone needs before its first launch on a device.
#pragma once

#include <map>
#include <mutex>

#include "handler.h"

namespace ejkernel {

// Multiprocessors of the device. The first call on a device also raises the kernel's limit of dynamic shared memory to
// `shared_bytes`.
template <auto KERNEL>
ffi::Error PrepareHopper(const char* name, int shared_bytes, int64_t& sms) {
  static std::mutex mutex;
  static std::map<int, int> known;
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [at, is_new] = known.try_emplace(device, 0);
  if (is_new) {
    int major = 0, minor = 0, count = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    cudaFuncAttributes code{};
    cudaFuncGetAttributes(&code, KERNEL);
    // A device of capability 9.0 may run code of 8.0, without this kernel, if the library was built without 9.0a.
    const bool fits = major == 9 && minor == 0 && code.binaryVersion == 90;
    if (fits) cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (ffi::Error failed = CheckLaunch(name, "kernel attributes"); failed.failure()) {
      known.erase(at);
      return failed;
    }
    at->second = fits ? count : -1;
  }
  if (at->second < 0) return Invalid(name, "needs a device of compute capability 9.0 and a library built for sm_90a");
  sms = at->second;
  return ffi::Error::Success();
}

}  // namespace ejkernel
