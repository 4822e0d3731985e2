#include "numbers.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace nccl {
namespace {

// bfloat16 is the upper half of a float, rounded to the nearest, ties to even.
struct BFloat16 {
  uint16_t bits;

  operator float() const {
    const uint32_t whole = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &whole, 4);
    return value;
  }

  BFloat16() = default;
  explicit BFloat16(float value) {
    uint32_t whole;
    memcpy(&whole, &value, 4);
    bits = std::isnan(value) ? 0x7FC0 : (whole + 0x7FFF + (whole >> 16 & 1)) >> 16;
  }
};

using Half = _Float16;

// The type that numbers are computed in.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>, float, T>;

template <typename T>
void reduce_all(T* into, char* const* parts, int ranks, size_t count, int reduction) {
  using W = Wide<T>;
  for (size_t i = 0; i < count; i++) {
    T sum = ((const T*)parts[0])[i];
    for (int rank = 1; rank < ranks; rank++) {
      const W a = (W)sum, b = (W)((const T*)parts[rank])[i];
      if (reduction == PRODUCT)
        sum = (T)(W)(a * b);
      else if (reduction == MAX)
        sum = (T)(a > b ? a : b);
      else if (reduction == MIN)
        sum = (T)(a < b ? a : b);
      else
        sum = (T)(W)(a + b);
    }
    if constexpr (std::is_integral_v<T>)
      if (reduction == AVERAGE) sum = (T)(sum / (T)ranks);
    into[i] = sum;
  }
}

template <typename T>
void scale_all(T* elements, size_t count, double factor) {
  using W = Wide<T>;
  const W rounded = (W)(T)(W)factor;
  for (size_t i = 0; i < count; i++) elements[i] = (T)(W)((W)elements[i] * rounded);
}

}  // namespace

size_t width(int type) {
  static const size_t widths[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < TYPES ? widths[type] : 0;
}

bool reduce(void* into, char* const* parts, int ranks, size_t count, int type, int reduction) {
#define CASE(TYPE, ELEMENT) \
  case TYPE: \
    return reduce_all((ELEMENT*)into, parts, ranks, count, reduction), true
  switch (type) {
    CASE(INT8, int8_t);
    CASE(UINT8, uint8_t);
    CASE(INT32, int32_t);
    CASE(UINT32, uint32_t);
    CASE(INT64, int64_t);
    CASE(UINT64, uint64_t);
    CASE(HALF, Half);
    CASE(FLOAT, float);
    CASE(DOUBLE, double);
    CASE(BFLOAT16, BFloat16);
    default: return false;
  }
#undef CASE
}

void scale(void* elements, size_t count, int type, double factor) {
  switch (type) {
    case HALF: return scale_all((Half*)elements, count, factor);
    case FLOAT: return scale_all((float*)elements, count, factor);
    case DOUBLE: return scale_all((double*)elements, count, factor);
    case BFLOAT16: return scale_all((BFloat16*)elements, count, factor);
    default: return;
  }
}

}  // namespace nccl
