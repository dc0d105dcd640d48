// linear: y = x w^T + bias with w [outputs][inputs] as a checkpoint has it, in float32 or half of it.
#include "linear.h"

#include <type_traits>

#include "rows.h"

#if defined(PIECEWORK_PANELS)
#include "multiply.h"
#else
#include "dots.h"
#endif

namespace piecework {

namespace {

template <typename T>
void run(const LinearCall& call) {
  const T* bias = static_cast<const T*>(call.bias);
  const auto finish = [&](int64_t row, int64_t first, int64_t count, const float* sums) {
    store_with_bias(static_cast<T*>(call.out) + row * call.outputs + first, sums, bias ? bias + first : nullptr, count);
  };
#if defined(PIECEWORK_PANELS)
  using P = std::conditional_t<std::is_same_v<T, bf16>, BrainWords, FloatWords<T>>;
  int64_t stride = call.x_stride;
  const auto* x = rows_as<typename P::X>(static_cast<const T*>(call.x), call.rows, call.inputs, &stride);
  const auto* w = static_cast<const T*>(call.weight);
  multiply(Product<P>{x, stride, call.rows, w, call.weight_stride, call.outputs, call.inputs}, finish);
#else
  dots_of<T>(call, finish);
#endif
}

}  // namespace
}  // namespace piecework

extern "C" void piecework_linear(const piecework::LinearCall* call) {
  piecework::with_type(call->type, [=](auto t) { piecework::run<decltype(t)>(*call); });
}
