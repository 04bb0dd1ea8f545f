// x W^T for activations and weights in bfloat16 (or int8 weights with a scale a row), sums in float32, with bias,
// residual or gate applied on the way out: pallas_kernels/linear.py.

#include "amx.h"
#include "ffi_op.h"
#include "linear_call.h"
#include "linear_vectors.h"
#include "parallel.h"
#if defined(SPARSESERVE_AMX)
#include "linear_amx.h"
#endif

namespace sparseserve::linear {
namespace {

template <class T>
void run(const Call& call, [[maybe_unused]] bool allow_amx, ffi::ThreadPool& threads) {
#if defined(SPARSESERVE_AMX)
  if (allow_amx && amx::available()) return Amx<T>(call).run(threads);
#endif
  run_vectors<T>(call, threads);
}

// Values of an optional argument; one without elements stands for none.
const float* optional(const Floats& values) { return values.element_count() == 0 ? nullptr : values.typed_data(); }

ffi::Error linear(ffi::ThreadPool threads, ffi::Buffer<ffi::BF16> x, ffi::AnyBuffer weight, Floats scales, Floats bias,
                  Floats residual, ffi::Result<ffi::AnyBuffer> out, bool gated, bool allow_amx) {
  SPARSESERVE_CHECK(rank(x) == 2 && rank(weight) == 2 && dim(x, 1) == dim(weight, 1),
                    "linear: x is [rows, in], weight [out, in]");
  Call call{reinterpret_cast<const Bf16*>(x.typed_data()), dim(x, 0), static_cast<int>(dim(x, 1)),
            weight.untyped_data(), static_cast<int>(dim(weight, 0)), optional(scales), optional(bias),
            optional(residual), gated, nullptr, nullptr};
  const int64_t size = call.rows * call.features();
  const bool is_int8 = weight.element_type() == ffi::DataType::S8;
  SPARSESERVE_CHECK(is_int8 || is_bf16(weight.element_type()), "linear: weights are bfloat16 or int8");
  SPARSESERVE_CHECK(is_int8 == (scales.element_count() > 0 || call.out == 0), "linear: int8 weights have scales");
  SPARSESERVE_CHECK(call.scales == nullptr || dim(scales, 0) == call.out, "linear: one scale a row of the weight");
  SPARSESERVE_CHECK(call.bias == nullptr || dim(bias, 0) == call.out, "linear: one bias a row of the weight");
  SPARSESERVE_CHECK(!gated || (call.out % 2 == 0 && call.residual == nullptr), "linear: gated weights are [gate; up]");
  SPARSESERVE_CHECK(call.residual == nullptr || static_cast<int64_t>(residual.element_count()) == size,
                    "linear: the residual is [rows, out]");
  SPARSESERVE_CHECK(static_cast<int64_t>(out->element_count()) == size &&
                        out->element_type() == (gated ? ffi::DataType::BF16 : ffi::DataType::F32),
                    "linear: the result is float32 [rows, out], gated bfloat16 [rows, out / 2]");
  if (size == 0) return ffi::Error::Success();
  if (gated) {
    call.gated_result = static_cast<Bf16*>(out->untyped_data());
  } else {
    call.result = static_cast<float*>(out->untyped_data());
  }
  if (is_int8) {
    run<int8_t>(call, allow_amx, threads);
  } else {
    run<Bf16>(call, allow_amx, threads);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparseserve::linear

SPARSESERVE_FFI_HANDLER(SparseServeLinear, sparseserve::linear::linear,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<sparseserve::Floats>()
                            .Arg<sparseserve::Floats>()
                            .Arg<sparseserve::Floats>()
                            .Ret<xla::ffi::AnyBuffer>()
                            .Attr<bool>("gated")
                            .Attr<bool>("allow_amx"));

// Whether `linear` has AMX here, which decides up to how many rows it is the fastest: asked by loader.py.
extern "C" __attribute__((visibility("default"))) int sparseserve_has_amx() {
#if defined(SPARSESERVE_AMX)
  return sparseserve::amx::available();
#else
  return 0;
#endif
}
