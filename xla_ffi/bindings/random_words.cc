#include "../numerics/philox.h"
#include "buffers.h"
#include "engine.h"
#include "handlers.h"

namespace jaxlowprec {
namespace {

using Words = ffi::Buffer<ffi::DataType::U32>;

/// Keys uint32 [n, 2] and the counters' first three words, each [n] -> two words of each call of Philox, [n, 2]. A handler,
/// because XLA would compile the ten rounds anew in each place of a program that asks for words.
ffi::Error random_words(ffi::ThreadPool, Words keys, Words first, Words second, Words third,
                        ffi::ResultBuffer<ffi::DataType::U32> words, int32_t stream) {
  const size_t count = first.element_count();
  JLP_REQUIRE(keys.element_count() == 2 * count && second.element_count() == count && third.element_count() == count &&
              words->element_count() == 2 * count);
  const uint32_t* key = keys.typed_data();
  uint32_t* to = words->typed_data();
  for (size_t i = 0; i < count; ++i) {
    uint32_t counter[4] = {first.typed_data()[i], second.typed_data()[i], third.typed_data()[i],
                           static_cast<uint32_t>(stream)};
    philox4x32_10<float>(counter, key[2 * i], key[2 * i + 1]);
    to[2 * i] = counter[0], to[2 * i + 1] = counter[1];
  }
  return ffi::Error::Success();
}

}  // namespace

JLP_DEFINE_CPU_HANDLER(random_words, random_words,
                       .Arg<Words>().Arg<Words>().Arg<Words>().Arg<Words>().Ret<Words>().Attr<int32_t>("stream"));

}  // namespace jaxlowprec
