// Tests of attention and of layers, with an instance for each instruction set
// (support/instruction_sets.h), which computes all of them.
#ifndef MHA_TESTS_SUPPORT_ATTENTION_TEST_H
#define MHA_TESTS_SUPPORT_ATTENTION_TEST_H

#include <gtest/gtest.h>

#include <cstdint>

#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/same_bits.h"
#include "support/specify.h"

namespace support {

class AttentionTest : public InstructionSetTest {
 protected:
  AttentionCall PlainCall() const {
    AttentionCall call;
    call.instruction_set = instruction_set();
    return call;
  }

  Outputs Run(const AttentionProblem &problem, uint32_t asked = AttentionCall().asked) const {
    AttentionCall call = PlainCall();
    call.asked = asked;
    return Attend(problem, call);
  }

  LayerForm PlainForm() const {
    LayerForm form;
    form.instruction_set = instruction_set();
    return form;
  }

  Layer Make(const LayerProblem &problem) const { return MakeLayer(problem, PlainForm()); }

  void ExpectTheSpecification(const AttentionProblem &problem) const {
    EXPECT_TRUE(SameBits(Run(problem), Specify(problem))) << Describe(problem);
  }

  void ExpectTheSpecification(const LayerProblem &problem) const {
    const Layer layer = Make(problem);
    ExpectTheSpecification(layer.get(), problem);
  }

  // With all optional outputs, and with none of them: only then a small layer may be computed
  // whole.
  void ExpectTheSpecification(const mha_layer *layer, const LayerProblem &problem) const {
    const Outputs expected = Specify(problem);
    EXPECT_TRUE(SameBits(Forward(layer, problem), expected)) << Describe(problem);
    LayerCall alone;
    alone.asked = kAskNothing;
    EXPECT_TRUE(SameBits(Forward(layer, problem, alone).y, expected.y))
        << "without other outputs, " << Describe(problem);
  }
};

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_ATTENTION_TEST_H
