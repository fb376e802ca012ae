// Launch configurations with attributes.
#pragma once

#include "handler.h"

namespace ejkernel {

struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};

  // `cluster_blocks` blocks form a cluster.
  Launch(cudaStream_t stream, int64_t blocks, dim3 block, int64_t shared_bytes, int cluster_blocks = 1) {
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = block;
    config.dynamicSmemBytes = size_t(shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    if (cluster_blocks > 1) {
      config.numAttrs = 1;
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = cluster_blocks;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
  }
  Launch(const Launch&) = delete;

  // Enable programmatic dependent launch: the kernel may start before the preceding one ends. For kernels without clusters that
  // call `wait_for_prerequisites`, which code older than 9.0 does not. Returns whether the code is new enough.
  template <typename Kernel>
  bool enable_programmatic_launch(Kernel kernel) {
    cudaFuncAttributes code;
    if (cudaFuncGetAttributes(&code, kernel) != cudaSuccess || code.ptxVersion < 90) return false;
    config.numAttrs = 1;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return true;
  }
};

}  // namespace ejkernel
