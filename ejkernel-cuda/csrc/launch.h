// Launches that say more than a grid and a block.
#pragma once

#include "handler.h"

namespace ejkernel {

struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};

  // `cluster_blocks` of them form a cluster.
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

  // Begins beside the kernel before, once that has ended or allows it; for kernels without clusters that wait for it, which
  // code of before 9.0 does not. Whether the code is newer.
  template <typename Kernel>
  bool begin_early(Kernel kernel) {
    cudaFuncAttributes code;
    if (cudaFuncGetAttributes(&code, kernel) != cudaSuccess || code.ptxVersion < 90) return false;
    config.numAttrs = 1;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return true;
  }
};

}  // namespace ejkernel
