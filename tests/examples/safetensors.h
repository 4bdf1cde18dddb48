/*
 * Reads a .safetensors file: 8 bytes with the length of the header, the header in JSON, and the
 * numbers as they are:
 *
 *     {"model.norm.weight": {"dtype": "F32", "shape": [768], "data_offsets": [0, 3072]},
 * "__metadata__": {"format": "pt"}}
 *
 * The file is mapped, not copied. All that the header says is checked before anything is used: a
 * file that was cut short, or is made up, gives a sentence. Numbers are little-endian, as they are
 * on every machine that runs the library's fast kernels.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { most_dimensions = 8, longest_dtype = 15 };

struct tensor {
  const char *name; /* in the file, without a 0 at its end; escapes as they are written */
  size_t name_length;
  char dtype[longest_dtype + 1]; /* "F32", "BF16", ... */
  int dimensions;
  int64_t shape[most_dimensions];
  uint64_t begin, end; /* of its bytes, counted from the end of the header */
  const void *data;
};

struct safetensors {
  const char *path;
  void *memory; /* the whole file */
  size_t bytes;
  struct tensor *tensors; /* sorted by name */
  size_t count;
  char error[256]; /* what is wrong with the file, a sentence */
};

struct json {
  struct safetensors *file;
  const char *begin, *at, *end;
};

static int safetensors_fail(struct safetensors *file, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(file->error, sizeof file->error, format, arguments);
  va_end(arguments);
  return 0;
}

static void json_skip_spaces(struct json *json) {
  while (json->at < json->end && strchr(" \t\r\n", *json->at) && *json->at) json->at++;
}

static int json_is_next(struct json *json, char c) {
  json_skip_spaces(json);
  if (json->at == json->end || *json->at != c) return 0;
  json->at++;
  return 1;
}

static int json_bad(struct json *json, const char *expected) {
  return safetensors_fail(json->file, "%s: its header has no %s at byte %zu", json->file->path,
                          expected, (size_t)(json->at - json->begin));
}

static int json_expect(struct json *json, char c) {
  const char expected[] = {'\'', c, '\'', 0};
  return json_is_next(json, c) || json_bad(json, expected);
}

static int json_string(struct json *json, const char **text, size_t *length) {
  if (!json_is_next(json, '"')) return json_bad(json, "string");
  *text = json->at;
  for (; json->at < json->end && *json->at != '"'; json->at++) {
    if ((unsigned char)*json->at < ' ') return json_bad(json, "printable character");
    if (*json->at == '\\' && ++json->at == json->end) break;
  }
  if (json->at >= json->end) return json_bad(json, "end of a string");
  *length = (size_t)(json->at++ - *text);
  return 1;
}

static int json_is(const char *text, size_t length, const char *word) {
  return length == strlen(word) && memcmp(text, word, length) == 0;
}

/* [1, 2, 3]: numbers from 0 to 2^63 - 1 */
static int json_numbers(struct json *json, int most, int64_t *numbers, int *count) {
  if (!json_expect(json, '[')) return 0;
  for (*count = 0; !json_is_next(json, ']'); ++*count) {
    if (*count > 0 && !json_expect(json, ',')) return 0;
    json_skip_spaces(json);
    const char *const first = json->at;
    int64_t number = 0;
    for (; json->at < json->end && *json->at >= '0' && *json->at <= '9'; json->at++) {
      const int digit = *json->at - '0';
      if (number > (INT64_MAX - digit) / 10) return json_bad(json, "number below 2^63");
      number = number * 10 + digit;
    }
    if (json->at == first || *count == most)
      return json_bad(json, "whole number, or too many of them,");
    numbers[*count] = number;
  }
  return 1;
}

/* {"dtype": "F32", "shape": [768], "data_offsets": [0, 3072]} */
static int json_tensor(struct json *json, struct tensor *tensor) {
  const char *text;
  size_t length;
  int has_dtype = 0, has_shape = 0, has_offsets = 0, count;
  int64_t offsets[2];
  if (!json_expect(json, '{')) return 0;
  for (int fields = 0; !json_is_next(json, '}'); fields++) {
    if ((fields > 0 && !json_expect(json, ',')) || !json_string(json, &text, &length) ||
        !json_expect(json, ':'))
      return 0;
    if (json_is(text, length, "dtype") && !has_dtype++) {
      if (!json_string(json, &text, &length)) return 0;
      if (length > longest_dtype)
        return json_bad(json, "type of at most 15 characters before the quote");
      memcpy(tensor->dtype, text, length);
    } else if (json_is(text, length, "shape") && !has_shape++) {
      if (!json_numbers(json, most_dimensions, tensor->shape, &tensor->dimensions)) return 0;
    } else if (json_is(text, length, "data_offsets") && !has_offsets++) {
      if (!json_numbers(json, 2, offsets, &count)) return 0;
      if (count != 2) return json_bad(json, "second offset");
      tensor->begin = (uint64_t)offsets[0];
      tensor->end = (uint64_t)offsets[1];
    } else {
      return json_bad(json, "dtype, shape or data_offsets, each once,");
    }
  }
  return (has_dtype && has_shape && has_offsets) ||
         json_bad(json, "dtype, shape and data_offsets before the '}'");
}

/* What a tensor says of itself against the bytes that there are. */
static int safetensors_check_tensor(struct safetensors *file, struct tensor *t, const char *data,
                                    uint64_t data_bytes) {
  const int length = t->name_length < 80 ? (int)t->name_length : 80;
  if (t->begin > t->end || t->end > data_bytes) {
    return safetensors_fail(file,
                            "%s: the tensor %.*s is bytes %llu to %llu of the data, but there are "
                            "%llu; was the file cut short?",
                            file->path, length, t->name, (unsigned long long)t->begin,
                            (unsigned long long)t->end, (unsigned long long)data_bytes);
  }
  t->data = data + t->begin;
  const struct {
    const char *dtype;
    uint64_t bytes;
  } types[] = {{"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I8", 1}, {"U8", 1}};
  for (int i = 0; i < 5;
       i++) { /* tensors of other types may be in the file, but are not for this reader */
    if (strcmp(t->dtype, types[i].dtype) != 0) continue;
    uint64_t bytes = types[i].bytes; /* counted no further than the file: so it can't overflow */
    for (int d = 0; d < t->dimensions; d++) {
      const uint64_t extent = (uint64_t)t->shape[d];
      bytes = extent > 0 && bytes > data_bytes / extent ? UINT64_MAX / extent : bytes;
      bytes *= extent;
    }
    if (bytes != t->end - t->begin) {
      return safetensors_fail(
          file, "%s: the tensor %.*s has %llu bytes, which its shape and its type %s do not make",
          file->path, length, t->name, (unsigned long long)(t->end - t->begin), t->dtype);
    }
    if ((uintptr_t)t->data % types[i].bytes) {
      return safetensors_fail(
          file,
          "%s: the tensor %.*s lies at an odd place; write the file again by a newer safetensors",
          file->path, length, t->name);
    }
  }
  return 1;
}

static int tensor_by_place(const void *a, const void *b) {
  const struct tensor *s = a, *t = b;
  return s->begin != t->begin ? (s->begin < t->begin ? -1 : 1)
                              : (s->end > t->end) - (s->end < t->end);
}

static int tensor_by_name(const void *a, const void *b) {
  const struct tensor *s = a, *t = b;
  const int order =
      memcmp(s->name, t->name, s->name_length < t->name_length ? s->name_length : t->name_length);
  return order ? order : (s->name_length > t->name_length) - (s->name_length < t->name_length);
}

static int safetensors_read_header(struct safetensors *file, struct json *json,
                                   uint64_t data_bytes) {
  const char *text;
  size_t length, room = 0;
  if (!json_expect(json, '{')) return 0;
  for (int entries = 0; !json_is_next(json, '}'); entries = 1) {
    if ((entries > 0 && !json_expect(json, ',')) || !json_string(json, &text, &length) ||
        !json_expect(json, ':'))
      return 0;
    if (json_is(text, length, "__metadata__")) { /* words for people */
      if (!json_expect(json, '{')) return 0;
      for (int words = 0; !json_is_next(json, '}'); words = 1) {
        if ((words && !json_expect(json, ',')) || !json_string(json, &text, &length) ||
            !json_expect(json, ':') || !json_string(json, &text, &length))
          return 0;
      }
      continue;
    }
    if (file->count == room) {
      room = 2 * room + 16;
      struct tensor *const more = realloc(file->tensors, room * sizeof *more);
      if (!more)
        return safetensors_fail(file, "%s: there is no memory for its list of tensors", file->path);
      file->tensors = more;
    }
    struct tensor *const tensor = &file->tensors[file->count];
    *tensor = (struct tensor){.name = text, .name_length = length};
    if (!json_tensor(json, tensor)) return 0;
    if (!safetensors_check_tensor(file, tensor, json->end, data_bytes)) return 0;
    file->count++;
  }
  json_skip_spaces(json);
  if (json->at != json->end) return json_bad(json, "end");

  /* The format wants the data covered without gap or overlap, and no name twice. */
  uint64_t covered = 0;
  if (file->count) qsort(file->tensors, file->count, sizeof *file->tensors, tensor_by_place);
  for (size_t i = 0; i < file->count; covered = file->tensors[i++].end) {
    if (file->tensors[i].begin != covered) {
      return safetensors_fail(file,
                              "%s: the tensors leave a gap or overlap at byte %llu of the data",
                              file->path, (unsigned long long)covered);
    }
  }
  if (covered != data_bytes)
    return safetensors_fail(file, "%s: has bytes behind its last tensor", file->path);
  if (file->count) qsort(file->tensors, file->count, sizeof *file->tensors, tensor_by_name);
  for (size_t i = 1; i < file->count; i++) {
    if (tensor_by_name(&file->tensors[i - 1], &file->tensors[i]) == 0) {
      return safetensors_fail(file, "%s: has a tensor twice", file->path);
    }
  }
  return 1;
}

static void safetensors_close(struct safetensors *file) {
  if (file->memory != MAP_FAILED) munmap(file->memory, file->bytes);
  free(file->tensors);
}

/* 1, or 0 and file->error; then there is nothing to close. */
static int safetensors_open(struct safetensors *file, const char *path) {
  *file = (struct safetensors){.path = path, .memory = MAP_FAILED};
  struct stat about;
  const int descriptor = open(path, O_RDONLY);
  if (descriptor < 0 || fstat(descriptor, &about) != 0 || !S_ISREG(about.st_mode)) {
    if (descriptor >= 0) close(descriptor);
    return safetensors_fail(file, "%s: cannot be read; a file is expected", path);
  }
  file->bytes = (size_t)about.st_size;
  if (file->bytes >= 8)
    file->memory = mmap(NULL, file->bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
  close(descriptor);
  if (file->memory == MAP_FAILED)
    return safetensors_fail(file, "%s: is too short for a .safetensors file, or cannot be mapped",
                            path);

  const unsigned char *const first = file->memory;
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; i--) header_bytes = header_bytes << 8 | first[i];
  if (header_bytes > file->bytes - 8) {
    safetensors_fail(file,
                     "%s: says that its header has %llu bytes, but %llu follow; it was cut short, "
                     "or is no .safetensors file",
                     path, (unsigned long long)header_bytes, (unsigned long long)file->bytes - 8);
  } else {
    const char *const header = (const char *)first + 8;
    struct json json = {.file = file, .begin = header, .at = header, .end = header + header_bytes};
    if (safetensors_read_header(file, &json, file->bytes - 8 - header_bytes)) return 1;
  }
  safetensors_close(file);
  return 0;
}

/* NULL: there is none of this name. */
static const struct tensor *safetensors_find(const struct safetensors *file, const char *name) {
  const struct tensor key = {.name = name, .name_length = strlen(name)};
  return file->count ? bsearch(&key, file->tensors, file->count, sizeof key, tensor_by_name) : NULL;
}

/* Some numbers of a tensor of F32, F16 or BF16, as floats. */
static void tensor_read(const struct tensor *t, int64_t first, int64_t count, float *out) {
  const int is_f16 = strcmp(t->dtype, "F16") == 0;
  if (strcmp(t->dtype, "F32") == 0) {
    memcpy(out, (const float *)t->data + first, (size_t)count * sizeof *out);
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = ((const uint16_t *)t->data)[first + i];
    const int is_finite = (bits >> 10 & 31) < 31;
    const uint32_t wide =
        !is_f16 ? bits << 16
                : (bits & 0x8000) << 16 | (bits & 0x7fff) << 13 | (is_finite ? 0 : 0x7f800000u);
    memcpy(&out[i], &wide, sizeof wide);
    if (is_f16 && is_finite) out[i] *= 0x1p112f; /* the exponents of float begin 112 earlier */
  }
}
