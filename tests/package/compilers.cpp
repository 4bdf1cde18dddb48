// Whether a library gives the published results on each instruction set that it has here. For
// compilers.py, and for builds whose other tests take long to run.
//
//     published [only] [SET...]     the sets that must be there; only: computes no others
#include <mha.h>

#include <cstdio>
#include <cstring>

#include "contract/results.h"

// A call whose arrays have more bytes than pointers of 32 bits can tell apart is refused there.
bool AddressSpaceIsRespected() {
  mha_attention_args args = {};
  args.struct_size = sizeof args;
  args.num_heads = args.call.batch = 1;
  args.head_dim = 1 << 10;
  args.call.n_q = args.call.n_kv = 1 << 20;
  size_t bytes = 0;
  const mha_status status = mha_attention_workspace(&args, &bytes, nullptr);
  return sizeof bytes == 4 ? status == MHA_ERROR_TOO_LARGE : status == MHA_OK;
}

int main(int argc, char **argv) {
  const bool is_only = argc > 1 && std::strcmp(argv[1], "only") == 0;
  int missing = argc - 1 - is_only;
  bool is_right = mha_contract() == static_cast<uint32_t>(results::PublishedContract());
  if (!AddressSpaceIsRespected()) {
    std::printf("the workspace of a call with arrays of 4 GiB has a size\n");
    is_right = false;
  }
  const results::Checksums &published = results::Published();
  for (uint32_t set = 1; set < 32; ++set) {
    if ((mha_instruction_sets() >> set & 1) == 0) continue;
    bool is_named = false;
    for (int i = 1; i < argc; ++i)
      is_named = is_named || std::strcmp(argv[i], mha_instruction_set_name(set)) == 0;
    missing -= is_named;
    if (is_only && !is_named) continue;
    size_t same = 0;
    for (const auto &[name, sum] : results::Compute(set, nullptr)) {
      const auto found = published.find(name);
      if (found != published.end() && found->second == sum)
        ++same;
      else
        std::printf("%s: %s has other bits\n", mha_instruction_set_name(set), name.c_str());
    }
    std::printf("%s: %u of %u\n", mha_instruction_set_name(set), static_cast<unsigned>(same),
                static_cast<unsigned>(published.size()));
    is_right = is_right && same == published.size();
  }
  if (missing != 0) std::printf("%d of the sets that are named are not there\n", missing);
  return is_right && missing == 0 ? 0 : 1;
}
