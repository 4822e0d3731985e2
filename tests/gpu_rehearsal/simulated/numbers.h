// The element types and reductions of NCCL on the CPU. Sums go from rank 0 to the last, each rounded to the type, so that
// a result depends neither on where an element is in a buffer nor on who computes it. NCCL's order on a card depends on
// both; hence equality bit for bit of two programs here means equality there up to the order of sums.
#pragma once

#include <cstddef>

namespace nccl {

enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, TYPES };
enum Reduction { SUM, PRODUCT, MAX, MIN, AVERAGE, REDUCTIONS };

size_t width(int type);

// Combine one buffer of `count` elements of each rank. The average of floats is a sum of numbers scaled before, so
// AVERAGE divides integers only. False: this type cannot be combined.
bool reduce(void* into, char* const* parts, int ranks, size_t count, int type, int reduction);

// Multiply each element by a factor, which is rounded to the type at first, as NCCL does. Integers stay as they are.
void scale(void* elements, size_t count, int type, double factor);

}  // namespace nccl
