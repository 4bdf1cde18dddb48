/* What a build without the kernels of the instruction set named by the argument says to one that
 * asks for them. */
#include <mha.h>
#include <stdio.h>
#include <string.h>

int main(int count, char **arguments) {
  for (uint32_t set = 1; count == 2 && strcmp(mha_instruction_set_name(set), "unknown") != 0;
       set++) {
    if (strcmp(mha_instruction_set_name(set), arguments[1]) != 0) continue;
    mha_attention_args args = {.struct_size = sizeof args,
                               .call.n_q = 1,
                               .call.n_kv = 1,
                               .num_heads = 1,
                               .head_dim = 1,
                               .instruction_set = set};
    mha_error error;
    size_t bytes;
    mha_attention_workspace(&args, &bytes, &error);
    printf("%s: %s\n", mha_status_string(error.status), error.message);
    return (mha_instruction_sets() >> set & 1u) != 0;
  }
  return 2;
}
