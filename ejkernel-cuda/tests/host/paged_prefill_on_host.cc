// The unchanged paged_prefill on a host, for float16 (kind 0) and bfloat16 (kind 1).
#include "paged_prefill/launch.cuh"
#include "tensor_map_on_host.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace ejkernel;
using namespace ejkernel::paged_prefill;

namespace {

PageTensorMap page_map_of(const Pages& pages, const std::array<TensorMapAxis, 5>& axes) {
  PageTensorMap map{static_cast<char*>(const_cast<void*>(pages.data))};
  for (int i = 0; i < 4; ++i) map.extent[i] = axes[i + 1].extent, map.stride[i] = axes[i + 1].stride;
  for (int i = 0; i < 2; ++i) map.box[i] = int(axes[i + 1].box);
  map.columns = axes[0].extent;
  return map;
}

template <class S>
void run(const Call& call) {
  const Arguments arguments = arguments_of<S>(call, tensor_map_of, page_map_of);
  host::launch(unsigned(call.batch * ctas_of_member<S>(call)), {S::kThreads, 1}, 1, [&] { attend<S>(arguments); },
               S::kShared + kExtraShared);
}

}  // namespace

EXPORT void paged_prefill_forward(int kind, const Call& call) {
  const auto choose = [&]<typename T>() {
    flash_attention::for_shape<T>(std::max(call.size, call.value_size), [&]<class S>() { run<S>(call); });
  };
  kind ? choose.template operator()<__nv_bfloat16>() : choose.template operator()<__half>();
}
