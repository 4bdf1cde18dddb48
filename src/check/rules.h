// Rules that fields obey, one line for each. What a number may be by itself stands in the comment
// of its field, from which tools/interface.py writes fields.cpp; relations of fields stand in the
// other files of this folder, by the kinds below or with a message of their own.
//
// Most calls are sound, and small ones take a few microseconds. So what compares is inline, and
// what writes a message is not.
#pragma once

#include <float.h>

#include <initializer_list>
#include <type_traits>

#include "../base/count.h"
#include "../base/report.h"

namespace mha {

// A field, and whether the caller set it: a number that is not 0, or a pointer.
struct Given {
  Given(const char *field, const void *pointer) : name(field), is_set(pointer != nullptr) {}
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  Given(const char *field, T value) : name(field), is_set(value != 0), is_number(true) {
    if constexpr (std::is_integral_v<T>)
      integer = value;
    else
      number = value;
  }
  const char *name;
  bool is_set, is_number = false;
  int64_t integer = 0;  // the number, or 0 where it is the one below
  double number = 0;
};

struct Rules {
  Report report;
  const char *prefix = "";  // of the names of fields, such as "rope."

  // ---- One number. `remedy` says what to set it to.

  mha_status range(const char *name, int64_t x, int64_t least, int64_t most,
                   const char *remedy) const {
    return x >= least && x <= most ? MHA_OK : fail(name, x, remedy);
  }
  // A width or a number of heads. More than INT32_MAX is an overflow rather than a wrong value.
  mha_status size(const char *name, int64_t x, int64_t least, const char *remedy) const {
    return x >= least && x <= INT32_MAX ? MHA_OK : fail_size(name, x, least, remedy);
  }
  // NaN is in no range.
  mha_status number(const char *name, double x, double least, double most,
                    const char *remedy) const {
    return x >= least && x <= most ? MHA_OK : fail(name, x, remedy);
  }
  mha_status number_or_0(const char *name, double x, double least, double most,
                         const char *remedy) const {
    return x == 0 ? MHA_OK : number(name, x, least, most, remedy);
  }
  mha_status one_of(const char *name, uint32_t x, std::initializer_list<uint32_t> values,
                    const char *remedy) const {
    for (const uint32_t value : values) {
      if (x == value) return MHA_OK;
    }
    return fail(name, int64_t{x}, remedy);
  }
  mha_status flags(const char *name, uint32_t x, uint32_t all, const char *remedy) const {
    return (x & ~all) == 0 ? MHA_OK
                           : report.invalid("%s%s has the unknown bits 0x%x; set only %s", prefix,
                                            name, x & ~all, remedy);
  }
  // `of_what` says of what.
  mha_status multiple(const char *name, int64_t x, int64_t of, const char *of_what) const {
    return x % of == 0 ? MHA_OK
                       : report.invalid("%s%s is %lld; set it to a multiple of %lld (%s)", prefix,
                                        name, lld(x), lld(of), of_what);
  }
  mha_status even(const char *name, int64_t x, const char *remedy) const {
    return x % 2 == 0 ? MHA_OK : fail(name, x, remedy);
  }

  // ---- The numbers of an array, which may be null, from `least` to less than infinity

  mha_status numbers(const char *name, const float *array, int64_t count, float least,
                     const char *what) const;

  // ---- Several fields

  // None of these has a meaning without `needed`.
  mha_status needs(Given needed, std::initializer_list<Given> fields) const;
  mha_status at_most_one(std::initializer_list<Given> fields) const;
  mha_status divides(const char *name, int64_t x, const char *of_name, int64_t of) const {
    return quotient(of, x) * x == of ? MHA_OK : fail_divides(name, x, of_name, of);
  }
  // `what` says what to pass.
  mha_status given(const char *name, const void *pointer, const char *what) const {
    return pointer ? MHA_OK : report.null("%s%s is NULL; pass %s", prefix, name, what);
  }
  mha_status fits(const char *name, Count bytes) const {
    if (!bytes.overflows()) return MHA_OK;
    return report.too_large("%s%s would exceed the address space; use smaller dimensions", prefix,
                            name);
  }

 private:
  mha_status fail(const char *name, int64_t x, const char *remedy) const MHA_COLD;
  mha_status fail(const char *name, double x, const char *remedy) const MHA_COLD;
  mha_status fail_size(const char *name, int64_t x, int64_t least,
                       const char *remedy) const MHA_COLD;
  mha_status fail_divides(const char *name, int64_t x, const char *of_name,
                          int64_t of) const MHA_COLD;
};

// All numbers of a struct, each by itself.
template <class Struct>
mha_status check_fields(const Rules &rules, const Struct &given);

// The arrays of a struct whose numbers, one for each head, have a rule.
template <class Struct>
mha_status check_arrays(const Rules &rules, const Struct &given, int64_t num_heads);

}  // namespace mha
