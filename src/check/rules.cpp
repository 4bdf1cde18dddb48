// The messages of the rules.
#include "rules.h"

#include <stdio.h>

namespace mha {

mha_status Rules::fail(const char *name, int64_t x, const char *remedy) const {
  return report.invalid("%s%s is %lld; set it to %s", prefix, name, lld(x), remedy);
}

mha_status Rules::fail(const char *name, double x, const char *remedy) const {
  return report.invalid("%s%s is %g; set it to %s", prefix, name, x, remedy);
}

mha_status Rules::fail_size(const char *name, int64_t x, int64_t least, const char *remedy) const {
  if (x < least) return fail(name, x, remedy);
  return report.too_large("%s%s is %lld; set it to at most %d", prefix, name, lld(x), INT32_MAX);
}

mha_status Rules::fail_divides(const char *name, int64_t x, const char *of_name, int64_t of) const {
  return report.shape("%s%s is %lld, which does not divide %s, %lld; set it to %s or to a divisor",
                      prefix, name, lld(x), of_name, lld(of), of_name);
}

mha_status Rules::numbers(const char *name, const float *array, int64_t count, float least,
                          const char *what) const {
  for (int64_t i = 0; array && i < count; ++i) {
    if (!(array[i] >= least && array[i] < MHA_INFINITY))
      return report.invalid("%s%s[%lld] is %g; it must be %s", prefix, name, lld(i),
                            static_cast<double>(array[i]), what);
  }
  return MHA_OK;
}

mha_status Rules::needs(Given needed, std::initializer_list<Given> fields) const {
  const auto unset = [](const Given &x) { return x.is_number ? "0" : "NULL"; };
  for (const Given &field : fields) {
    if (needed.is_set || !field.is_set) continue;
    char value[32] = "given";
    if (field.integer) snprintf(value, sizeof value, "%lld", lld(field.integer));
    if (field.number != 0) snprintf(value, sizeof value, "%g", field.number);
    return report.invalid("%s%s is %s, but %s%s is %s; set %s%s, or set %s%s to %s", prefix,
                          field.name, value, prefix, needed.name, unset(needed), prefix,
                          needed.name, prefix, field.name, unset(field));
  }
  return MHA_OK;
}

mha_status Rules::at_most_one(std::initializer_list<Given> fields) const {
  const Given *first = nullptr;
  for (const Given &field : fields) {
    if (!field.is_set) continue;
    if (first)
      return report.invalid("%s%s and %s are both set; set only one of them", prefix, first->name,
                            field.name);
    first = &field;
  }
  return MHA_OK;
}

}  // namespace mha
