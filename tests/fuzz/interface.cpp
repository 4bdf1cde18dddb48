#include "fuzz/bytes.h"
#include "mha.h"
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Bytes bytes(data, size);
  mha_status_string(static_cast<mha_status>(bytes.Raw(4)));
  return 0;
}
