// Runs attention, the linears, look-ups and moves on odd sizes, without Python: for the sanitizers. Prints "ok" at the end.
//
// All tensors have exactly the bytes that a call may touch, so that one byte too far is found.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "attention.h"
#include "block_dot.h"
#include "coded.h"
#include "embedding.h"
#include "file_blocks.h"
#include "int8_linear.h"
#include "linear.h"
#include "move.h"
#include "run.h"

extern "C" void piecework_paged_attention(const piecework::AttentionCall*);
extern "C" void piecework_linear(const piecework::LinearCall*);
extern "C" void piecework_linear_w8a8(const piecework::W8A8Call*);
extern "C" void piecework_code(const piecework::CodeCall*);
extern "C" void piecework_embedding_coded(const piecework::CodedEmbeddingCall*);
#if PIECEWORK_LANES == 16
extern "C" void piecework_linear_coded(const piecework::CodedLinearCall*);
#endif
extern "C" void piecework_linear_blocks(const piecework::BlockLinearCall*);
extern "C" void piecework_embedding(const piecework::EmbeddingCall*);
extern "C" void piecework_embedding_int8(const piecework::Int8EmbeddingCall*);
extern "C" void piecework_embedding_blocks(const piecework::BlockEmbeddingCall*);
extern "C" void piecework_dequantise_rows(const piecework::DequantiseCall*);
extern "C" void piecework_move_rows(const piecework::TensorMove*, int64_t, int64_t);
extern "C" void piecework_pack_rows(const piecework::PackCall*);

namespace {
using namespace piecework;
std::mt19937 generator(1);
constexpr int64_t KINDS[] = {Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K};

// Heap memory of exactly this size: a vector may have more.
template <typename T>
struct Buffer {
  std::unique_ptr<T[]> data;
  size_t size;
  explicit Buffer(size_t n) : data(new T[n]()), size(n) {}
};

template <typename T>
Buffer<T> random_values(size_t n) {
  Buffer<T> made(n);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < n; ++i) made.data[i] = from_float<T>(normal(generator));
  return made;
}

void expect(bool good, const char* what) {
  if (good) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

template <typename T>
constexpr int64_t type_of() {
  return sizeof(T) == 4 ? FLOAT32 : std::is_same<T, bf16>::value ? BFLOAT16 : FLOAT16;
}

template <typename T>
void linear(int64_t rows, int64_t outputs, int64_t inputs, bool with_bias) {
  auto x = random_values<T>(rows * inputs), w = random_values<T>(outputs * inputs), b = random_values<T>(outputs);
  Buffer<T> y(rows * outputs);
  const LinearCall call{x.data.get(), w.data.get(), with_bias ? b.data.get() : nullptr, y.data.get(), inputs,
                        inputs,       rows,         outputs,                            inputs,       type_of<T>()};
  piecework_linear(&call);
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < outputs; ++n) {
      double sum = with_bias ? to_float(b.data[n]) : 0;
      for (int64_t k = 0; k < inputs; ++k)
        sum += double(to_float(x.data[m * inputs + k])) * to_float(w.data[n * inputs + k]);
      expect(std::abs(sum - to_float(y.data[m * outputs + n])) < 0.02 * std::sqrt(double(inputs)) + 1e-3, "linear");
    }
}

// All bytes are random but for the scales and minimums of each block, small numbers: every weight and every scale of 6
// or 8 bits is met. What a row gives is the sum over the weights that the embedding reads.
void blocks(int64_t rows, int64_t outputs, int64_t count, int64_t kind) {
  const Layout layout = layout_of(kind);
  const int64_t inputs = count * layout.channels(), groups = (outputs + GROUP - 1) / GROUP, stride = outputs + 3;
  auto x = random_values<float>(rows * inputs);
  Buffer<uint8_t> w(groups * count * kind);
  for (size_t i = 0; i < w.size; ++i)
    w.data[i] = uint8_t(int64_t(i) % kind < layout.head() ? generator() & 31 : generator());
  Buffer<float> y(rows * stride - 3);
  const BlockLinearCall call{x.data.get(), w.data.get(), nullptr, y.data.get(), inputs, stride,
                             rows,         outputs,      inputs,  kind,         FLOAT32};
  piecework_linear_blocks(&call);
  Buffer<int64_t> ids(outputs);
  for (int64_t n = 0; n < outputs; ++n) ids.data[n] = n;
  Buffer<float> weights(outputs * inputs);
  const BlockEmbeddingCall all{ids.data.get(), w.data.get(), weights.data.get(), outputs, inputs, groups, kind, FLOAT32};
  piecework_embedding_blocks(&all);
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < stride - (m == rows - 1 ? 3 : 0); ++n) {
      double sum = 0, size = 0;
      for (int64_t k = 0; n < outputs && k < inputs; ++k) {
        const double product = double(x.data[m * inputs + k]) * weights.data[n * inputs + k];
        sum += product, size += std::abs(product);
      }
      expect(std::abs(y.data[m * stride + n] - sum) <= 0.03 * size, "linear_blocks");  // int8 activations
    }
}

// The first and the last block have more exponents than a table holds.
void coded(int64_t rows, int64_t outputs, int64_t inputs) {
  auto x = random_values<bf16>(rows * inputs), w = random_values<bf16>(outputs * inputs);
  for (int64_t i = 0; i < 40 && i < inputs; ++i) {
    w.data[i].bits = uint16_t((100 + i) << 7);
    w.data[outputs * inputs - 1 - i].bits = uint16_t((100 + i) << 7);
  }
  Buffer<uint8_t> made(size_t(CodedShape(outputs, inputs).bytes()));
  int64_t spilled = 0;
  const CodeCall code{w.data.get(), made.data.get(), &spilled, inputs, outputs, inputs};
  piecework_code(&code);
  Buffer<int64_t> ids(outputs + 1);
  for (int64_t n = 0; n <= outputs; ++n) ids.data[n] = n;
  Buffer<bf16> table((outputs + 1) * inputs);
  const CodedEmbeddingCall all{ids.data.get(), made.data.get(), table.data.get(), outputs + 1, outputs, inputs};
  piecework_embedding_coded(&all);
  expect(spilled > CodedShape(outputs, inputs).slots() || !std::memcmp(table.data.get(), w.data.get(), 2 * w.size),
         "embedding_coded");
  expect(table.data[outputs * inputs].bits == 0xffff, "embedding_coded without a row");
#if PIECEWORK_LANES == 16
  Buffer<bf16> y(rows * outputs), wanted(rows * outputs);
  const CodedLinearCall call{x.data.get(), made.data.get(), nullptr, y.data.get(), inputs, rows, outputs, inputs};
  piecework_linear_coded(&call);
  const LinearCall plain{x.data.get(), table.data.get(), nullptr, wanted.data.get(), inputs,
                         inputs,       rows,             outputs, inputs,            BFLOAT16};
  piecework_linear(&plain);
  expect(!std::memcmp(y.data.get(), wanted.data.get(), 2 * y.size), "linear_coded");
#endif
}

void int8(int64_t rows, int64_t outputs, int64_t inputs) {
  Buffer<int8_t> x(rows * inputs), w(outputs * inputs);
  for (auto* b : {&x, &w})
    for (size_t i = 0; i < b->size; ++i) b->data[i] = int8_t(generator());
  Buffer<float> scale(outputs), y(rows * outputs);
  for (int64_t n = 0; n < outputs; ++n) scale.data[n] = 1;
  const W8A8Call call{x.data.get(), w.data.get(), scale.data.get(), nullptr, nullptr, nullptr, y.data.get(),
                      rows,         outputs,      inputs,           inputs,  FLOAT32, FLOAT32};
  piecework_linear_w8a8(&call);
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < outputs; ++n) {
      int32_t sum = 0;
      for (int64_t k = 0; k < inputs; ++k) sum += int32_t(x.data[m * inputs + k]) * w.data[n * inputs + k];
      expect(y.data[m * outputs + n] == float(sum), "linear_w8a8");
    }
}

void embedding() {
  const int64_t ids[] = {4, 0, -1, 5, int64_t(1) << 60, 3};  // of 5, or of 8 in one group
  auto table = random_values<float>(5 * 9);
  Buffer<float> y(6 * 7), z(6 * 256);
  const EmbeddingCall call{ids, table.data.get(), y.data.get(), 6, 7 * 4, 9 * 4, 5};
  piecework_embedding(&call);
  Buffer<int8_t> rounded(5 * 9);
  Buffer<float> scale(5), rows(6 * 9);
  for (int i = 0; i < 5 * 9; ++i) rounded.data[i] = int8_t(i - 20);
  for (int i = 0; i < 5; ++i) scale.data[i] = float(i + 1) / 4;
  const Int8EmbeddingCall int8{ids, rounded.data.get(), scale.data.get(), rows.data.get(), 6, 9, 5, FLOAT32};
  piecework_embedding_int8(&int8);
  expect(rows.data[8] == 24 * 1.25f && std::isnan(rows.data[2 * 9]) && rows.data[5 * 9] == 7, "embedding_int8");
  for (int64_t kind : KINDS) {
    const int64_t size = layout_of(kind).channels();
    Buffer<uint8_t> w(kind);
    const BlockEmbeddingCall blocks{ids, w.data.get(), z.data.get(), 6, size, 1, kind, FLOAT32};
    piecework_embedding_blocks(&blocks);
    expect(z.data[0] == 0 && std::isnan(z.data[2 * size]) && z.data[3 * size] == 0, "embedding_blocks");
  }
  expect(y.data[0] == table.data[4 * 9] && std::isnan(y.data[2 * 7]) && std::isnan(y.data[3 * 7]), "embedding");
}

void dequantise() {
  const int64_t kinds[][2] = {{FILE_Q4_0, 2}, {FILE_Q4_1, 4}, {FILE_Q8_0, 2}};  // and where the integers begin
  for (auto [kind, head] : kinds) {
    Buffer<uint8_t> rows(6 * 2 * kind);
    std::memset(rows.data.get(), 0, rows.size);
    for (int64_t r = 0; r < 6; ++r) {
      rows.data[r * 2 * kind + 1] = 0x3c;  // the scale, 1 in float16
      rows.data[r * 2 * kind + head] = uint8_t(r);
    }
    Buffer<float> y(6 * 64);
    const DequantiseCall call{rows.data.get(), y.data.get(), 6, 64, kind, 6, FLOAT32};
    piecework_dequantise_rows(&call);
    const float zero = kind == FILE_Q4_0 ? -8 : 0;
    for (int64_t r = 0; r < 6; ++r) expect(y.data[(r % 2 * 3 + r / 2) * 64] == float(r) + zero, "dequantise_rows");
    Buffer<uint8_t> packed(2 * 2 * 8 * kind);  // rows 5 to 10 of 16
    std::memset(packed.data.get(), 0, packed.size);
    const PackCall pack{rows.data.get(), packed.data.get(), 6, 2, kind, 6, 5};
    piecework_pack_rows(&pack);
    expect(packed.data[2 * 5 + 1] == 0x3c && packed.data[2 * 4 + 1] == 0, "the scales of pack_rows");
    expect(packed.data[8 * head + 4 * 6] == 2, "pack_rows");  // row 1 of a half is row 2 of the file
  }
}

struct Copy {
  const char* from;
  char* to;
  int64_t size;
};

void copy(const void* call) {
  const Copy& c = *static_cast<const Copy*>(call);
  for (int64_t i = 0; i < c.size; ++i) c.to[i] = char(c.from[i] + 1);
}

// Two calls with memory between them, 64 + 3 * tokens bytes of it, on several threads.
void pieces() {
  const Field fields[] = {{FIRST, 0, 1},      {ARENA, 0, 64}, {NUMBER, 3, 0},
                          {ARENA, 0, 64}, {FIRST + 1, 0, 0},  {NUMBER, 3, 0}};
  const Step steps[] = {{copy, fields, 3}, {copy, fields + 3, 3}};
  auto run = [&](int64_t tokens) {
    Buffer<char> x(3 * tokens + 1), y(3 * tokens);
    for (size_t i = 0; i < x.size; ++i) x.data[i] = char(i);
    const int64_t buffers[] = {int64_t(x.data.get()), int64_t(y.data.get())};
    expect(piecework_run(steps, 2, buffers, tokens, 64 + 3 * tokens) == 0, "piecework_run");
    for (size_t i = 0; i < y.size; ++i) expect(y.data[i] == char(i + 3), "what a piece copies");
  };
  std::vector<std::thread> threads;
  for (int64_t first : {1, 40, 7}) threads.emplace_back([=] { for (int64_t t : {0, 5, 900}) run(first + t); });
  for (auto& thread : threads) thread.join();
}

// C: of the cache, T or int8 with scales.
template <typename T, typename C>
void attention(std::vector<int> queries, std::vector<int> lengths, int64_t kv_heads, int64_t group, int64_t dim,
               int64_t page_size, int64_t window, int padding) {
  const int64_t sequences = int64_t(queries.size());
  int64_t pages = 1, most = 1, valid = 0;
  Buffer<int32_t> starts(sequences + 1), contexts(sequences);
  for (int64_t b = 0; b < sequences; ++b) {
    const int64_t n = (lengths[b] + page_size - 1) / page_size;
    pages += n;
    most = std::max(most, n);
    valid += queries[b];
    starts.data[b + 1] = int32_t(valid);
    contexts.data[b] = lengths[b];
  }
  const int64_t rows = valid + padding;
  Buffer<int32_t> table(sequences * most), slots(rows);
  int32_t next = 1;
  for (int64_t b = 0; b < sequences; ++b) {
    for (int64_t i = 0; i < (lengths[b] + page_size - 1) / page_size; ++i) table.data[b * most + i] = next++;
    for (int i = 0; i < queries[b]; ++i) {
      const int at = lengths[b] - queries[b] + i;
      slots.data[starts.data[b] + i] =
          int32_t(table.data[b * most + at / page_size] * page_size + at % page_size);
    }
  }
  const int64_t width = kv_heads * dim;
  auto q = random_values<T>(rows * width * group), k = random_values<T>(rows * width);
  auto v = random_values<T>(rows * width);
  constexpr bool int8 = std::is_same<C, int8_t>::value;
  Buffer<C> keys(pages * width * page_size), values(keys.size);
  auto key_scales = random_values<bf16>(int8 ? pages * kv_heads * page_size : 0);
  auto value_scales = random_values<bf16>(key_scales.size);
  for (auto* cache : {&keys, &values})
    for (size_t i = 0; i < cache->size; ++i)
      if constexpr (int8)
        cache->data[i] = int8_t(generator());
      else
        cache->data[i] = random_values<C>(1).data[0];
  for (auto* scales : {&key_scales, &value_scales})
    for (size_t i = 0; i < scales->size; ++i)
      scales->data[i] = from_float<bf16>(to_float(scales->data[i]) / 127);
  Buffer<T> out(rows * width * group);
  const AttentionCall call{q.data.get(),         k.data.get(),
                           v.data.get(),         out.data.get(),
                           keys.data.get(),      values.data.get(),
                           key_scales.data.get(), value_scales.data.get(),
                           slots.data.get(),     table.data.get(),
                           starts.data.get(),    contexts.data.get(),
                           width * group,        width,
                           width,                width * group,
                           rows,                 sequences,
                           most,                 kv_heads * group,
                           kv_heads,             dim,
                           page_size,            window,
                           type_of<T>(),         int8 ? int64_t(INT8) : type_of<T>(),
                           1 / std::sqrt(double(dim))};
  piecework_paged_attention(&call);
  for (size_t i = 0; i < out.size; ++i) {
    const float y = to_float(out.data[i]);
    expect(std::abs(y) < 8, "attention");  // a mean of values
    expect(i < size_t(valid * width * group) || y == 0, "padding");
  }
}

template <typename T, typename C>
void attentions() {
  attention<T, C>({1, 1, 1}, {1, 65, 700}, 2, 3, 64, 16, 0, 2);
  attention<T, C>({5, 1, 90}, {5, 33, 140}, 1, 4, 80, 7, 0, 1);
  attention<T, C>({1, 3}, {300, 70}, 3, 1, 24, 1, 40, 0);
  attention<T, C>({20}, {2500}, 1, 2, 8, 64, 0, 0);
}

template <typename T>
void all() {
  for (int64_t inputs : {1, 7, 16, 33, 64, 1100})
    for (int64_t rows : {1, 2, 3, 7, 15, 31, 50}) linear<T>(rows, rows > 7 ? 37 : 5, inputs, inputs % 2);
  attentions<T, T>();
  attentions<T, int8_t>();
}

// Two tensors of `rows` rows move from strides of `small` to `large` and back; one may be shared by threads.
void move(int64_t rows, int64_t size, int64_t small, int64_t large, bool stream) {
  Buffer<uint8_t> buffers[] = {Buffer<uint8_t>((rows - 1) * large + size), Buffer<uint8_t>((rows - 1) * large + size)};
  const auto value = [](int64_t t, int64_t i) { return uint8_t(i * 7 + i / 251 + t); };
  for (int64_t t = 0; t < 2; ++t)
    for (int64_t i = 0; i < rows * size; ++i) buffers[t].data[i / size * small + i % size] = value(t, i);
  for (const bool up : {true, false}) {
    const int64_t from = up ? small : large, to = up ? large : small;
    const RowRun run{from, to, from, to, rows - 1, size, up};
    const TensorMove moves[] = {{(char*)buffers[0].data.get(), &run, 1}, {(char*)buffers[1].data.get(), &run, 1}};
    piecework_move_rows(moves, 2, stream ? 0 : INT64_MAX);
    for (int64_t t = 0; t < 2; ++t)
      for (int64_t i = 0; i < rows * size; ++i)
        expect(buffers[t].data[i / size * to + i % size] == value(t, i), "move_rows");
  }
}

}  // namespace

int main() {
  all<float>();
  all<bf16>();
  all<f16>();
  for (int64_t kind : KINDS)
    for (int64_t rows : {1, 2, 3, 4, 9}) blocks(rows, 5 + 8 * rows, rows, kind);
  for (int64_t kind : {Q4_1, Q4_K, Q6_K}) blocks(40, 200, 3, kind);
  for (int64_t rows : {1, 3, 9, 16, 47, 53}) int8(rows, 21, 75);
  int8(50, 200, 2070);
  for (int64_t rows : {1, 2, 7, 9, 16, 31, 50, 70}) coded(rows, 5 + 3 * rows, 20 + 9 * rows);
  coded(70, 75, 2100);
  embedding();
  dequantise();
  pieces();
  for (const bool stream : {false, true}) {
    for (int64_t size : {1, 15, 64, 1000}) move(40, size, size + 2, 3 * size + 5, stream);
    for (int64_t large : {1100, 1537, 2048, 5000}) move(500, 1000, 1024, large, stream);
    for (int64_t large : {310000, 390001, 800000}) move(3, 300000, 300001, large, stream);
  }
  std::printf("ok\n");
}
