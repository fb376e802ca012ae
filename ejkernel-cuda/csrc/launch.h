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

  // Begins beside the kernel before, once that allows it; for kernels that wait for it, of 9.0 and newer, without clusters.
  void begin_early() {
    config.numAttrs = 1;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
};

}  // namespace ejkernel
