// Kernels of softmax on a host.
#include "softmax/kernels.cuh"
#include "rows_on_host.h"

EXPORT void softmax_forward(int kind, bool packed, Shape shape, const void* x, softmax::Mask mask, void* out, int width,
                            float scale) {
  typed(kind, packed, [&]<typename T, int N>() {
    using Op = softmax::Forward<T, N>;
    rows(Op{static_cast<const T*>(x), mask, static_cast<T*>(out), width, scale}, shape);
  });
}

EXPORT void softmax_backward(int kind, bool packed, Shape shape, const void* out, const void* grad, softmax::Mask mask,
                             void* d_x, int width, float scale) {
  typed(kind, packed, [&]<typename T, int N>() {
    using Op = softmax::Backward<T, N>;
    rows(Op{static_cast<const T*>(out), static_cast<const T*>(grad), mask, static_cast<T*>(d_x), width, scale}, shape);
  });
}
