// Training and scoring of small networks on a CPU: vector lanes are samples.
//
// A network is a list of operations on values (plan.py makes it from a module). A value is stored as
// [block of L samples][channel][row][column][L], with a border of zeros where a convolution wants one,
// so one vector instruction does the same for L samples and no shape of layer is awkward. Gradients
// have the same form without a border.
//
// Only vector extensions of GCC and Clang are used. The lower half of this file is compiled once for
// every instruction set that the architecture knows (it includes itself), and `best` says which of
// them this CPU has.

#ifndef LANES

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>
#include <vector>

#define UNROLL _Pragma("GCC unroll 16")

namespace {

enum Kind { CONV, LINEAR, NORM, ACT, MAXPOOL, AVGPOOL, ADD, COPY, DROPOUT };
enum Activation { NONE, RELU, GELU, GELU_TANH, SILU, TANH, SIGMOID, LEAKY };

struct Op {  // mirrored in plan.py
    int64_t kind, in, in2, out;
    int64_t kh, kw, sy, sx, py, px, dy, dx, groups;
    int64_t weight, so, si, sky, skx, bias;  // places in the row, and the kernel's strides there; -1: none
    int64_t relu, pool, activation;
    int64_t needs, needs2;    // whether a gradient goes on to the input, to the second one
    int64_t again, again2;    // whether it is added to one that is there
    int64_t learns, adds;     // whether weights get a gradient; whether that is added to one that is there
    int64_t batch;            // of a norm: statistics of the batch (1), of the row (2), of each sample's groups (0)
    int64_t mean, var;        // where running statistics are in the row; -1: nowhere
    int64_t tile;             // of a 3x3 convolution with fewer products: outputs of a tile, across; 0: the plain way
    double eps, momentum, scale;
};

struct Value {
    int64_t c, h, w, pad, of;  // of: the value whose memory this is another view of, or -1
};

enum Method { SGD, ADAM, ADAMW, ADAGRAD };

// Batches of labelled images: batch k has those at[cut[k]] to at[cut[k + 1] - 1]; the rest is as in fl_load. Mirrored in net.py.
struct Batches {
    const void* images;
    int64_t kind, crop, number;
    const int64_t *at, *y, *cut;
    const float *scale, *shift;
    const uint8_t* flip;
    const int32_t* offset;
};

struct Update {  // how weights follow a gradient, mirrored in net.py
    int64_t kind;
    float *first, *second, *count;  // what the method remembers of every weight, and its steps; null: nothing
    double lr, momentum, decay, clip, beta1, beta2, eps;  // clip: infinite for none
    const float *to, *push;  // what is added to every gradient: pull * (w - to) + push; null: nothing
    double pull;
};

struct Rates {  // an update's constants of one step
    float lr, momentum, decay, share, keep, new1, beta2, new2, eps, rate, root;
};

struct Tap { int32_t in, w; };                      // where a tap reads, and its place among packed weights
struct Cell { int32_t to, from, step, n, list; };   // neighbouring input positions with the same taps
struct Taps { Tap* first; int32_t count; };

struct Tiles {  // the sizes of what a convolution with fewer products works on
    long across, down, each;      // tiles of an output, of one block
    long points;                  // products of a tile
    long at_once, some;           // tiles (of any block) that are transformed, and multiplied, at a time
    long outputs;                 // channels that are computed at a time
    long inputs, kernels, products, turned;  // floats of the transformed inputs, kernels, products; inputs with channels as lanes
};

constexpr long SIDE_BY_SIDE = 4;  // tiles that one register tile takes
constexpr long FEW_BYTES = 5 << 20;  // that transformed inputs may take
constexpr long SKEW = 16;  // floats between the planes of products: strides of powers of two would share few lines of a cache

struct Conv {  // what is worked out once for a convolution
    long ic, oc, units, taps;   // channels of a group; outputs (or pooled windows) of one block; taps of an output
    long oh, ow, rows, cols;    // of the whole output; of what is stored (pooled)
    int32_t *from, *to;         // per unit: offset of its input and of its output
    Tap* tap;
    Cell* cells;
    int32_t* row;               // the cells of each input row: row[y] to row[y + 1]
    Taps* lists;
    bool together;              // backward takes all blocks at once
    Tiles forth, back;          // with fewer products: of outputs, of the input's gradient
};

// The matrices of F(M, 3): M outputs of a filter of 3 taps from N = M + 2 products (Winograd's minimal filtering, by
// Toom and Cook's points 0, 1, -1, 2, -2 and infinity). outputs = OUT ((TAPS w) * (IN x)).
template <int M> struct Few;
template <> struct Few<3> {
    static constexpr int N = 5;
    static constexpr float IN[5][5] = {{2, -1, -2, 1, 0}, {0, -2, -1, 1, 0}, {0, 2, -3, 1, 0}, {0, -1, 0, 1, 0}, {0, 2, -1, -2, 1}};
    static constexpr float TAPS[5][3] = {{1 / 2.f, 0, 0}, {-1 / 2.f, -1 / 2.f, -1 / 2.f}, {-1 / 6.f, 1 / 6.f, -1 / 6.f},
                                         {1 / 6.f, 1 / 3.f, 2 / 3.f}, {0, 0, 1}};
    static constexpr float OUT[3][5] = {{1, 1, 1, 1, 0}, {0, 1, -1, 2, 0}, {0, 1, 1, 4, 1}};
};
template <> struct Few<4> {
    static constexpr int N = 6;
    static constexpr float IN[6][6] = {{4, 0, -5, 0, 1, 0}, {0, -4, -4, 1, 1, 0}, {0, 4, -4, -1, 1, 0},
                                       {0, -2, -1, 2, 1, 0}, {0, 2, -1, -2, 1, 0}, {0, 4, 0, -5, 0, 1}};
    static constexpr float TAPS[6][3] = {{1 / 4.f, 0, 0}, {-1 / 6.f, -1 / 6.f, -1 / 6.f}, {-1 / 6.f, 1 / 6.f, -1 / 6.f},
                                         {1 / 24.f, 1 / 12.f, 1 / 6.f}, {1 / 24.f, -1 / 12.f, 1 / 6.f}, {0, 0, 1}};
    static constexpr float OUT[4][6] = {{1, 1, 1, 1, 1, 0}, {0, 1, -1, 2, -2, 0}, {0, 1, 1, 4, 4, 0}, {0, 1, -1, 8, -8, 1}};
};

struct Program {
    int lanes, isa, n_ops, n_values, n_out;
    long blocks;
    Op* ops;
    Value* values;
    int64_t* out;
    Conv** conv;
    float **x, **g, **rx, **rg;  // by value: data, gradient, and their derivatives along a direction
    float **stat, **rstat;       // by operation: what a norm keeps
    int32_t** arg;               // by operation: the largest of a window
    float** mask;                // by operation: dropout
    float *delta, *rdelta, *packed, *packed2, *sums, *channel_sums, *set_sums, *turned;
    float *few_inputs, *few_kernels, *few_products;  // transformed, where there are fewer products
    long delta_size, packed_size;
    std::vector<void*>* owned;
    long bytes;
    long grad_size;
    std::vector<long>* grad_at;
    int n;                       // samples of the loaded batch
    std::vector<char>* alone;    // by operation: a linear layer whose weights nothing else reads
    const Update* at_once;       // such layers' weights move as soon as their gradient is known
    Rates rates;
    float* rows;                 // the loaded images as [sample][pixel], for a linear layer that reads them
    const uint8_t* held;         // classes whose logits the loss sees; null: all
    int as_zero;                 // whether the logits of others count as 0, not as minus infinity
    double** watched;            // by value: where its gradient, added up over samples, is wanted as going back gets to it
};

constexpr int CHANNELS = 32;  // of a wide convolution that are taken at a time
constexpr long CACHE = 32768;  // bytes that stay close to a core
constexpr long AT_ONCE = 256;  // pixels of an image that are fetched at a time
constexpr int EDGE = 3;  // columns of zeros around a gradient: what a tile of four may touch beyond it

void* get(Program* p, size_t bytes, bool zero = true) {
    bytes = (bytes + 127) / 64 * 64;
    void* m = aligned_alloc(64, bytes);
    if (!m) throw std::bad_alloc();
    if (zero) memset(m, 0, bytes);
    p->owned->push_back(m);
    p->bytes += bytes;
    return m;
}

long padded(long n) { return (n + 63) / 64 * 64; }  // whole vectors of any instruction set, four at a time
long row_size(const Value& v, long lanes) { return (v.w + 2 * v.pad) * lanes; }
long channel_size(const Value& v, long lanes) { return (v.h + 2 * v.pad) * row_size(v, lanes); }
long block_size(const Value& v, long lanes) { return v.c * channel_size(v, lanes); }
long plain_size(const Value& v, long lanes) { return v.c * v.h * v.w * lanes; }

long up_to(long n, long m) { return (n + m - 1) / m * m; }

// Tiles of maps of h x w that are made of `ic` channels.
Tiles tiles_of(const Op& o, long ic, long oc, long h, long w, long blocks, long lanes) {
    Tiles t{};
    const long n = o.tile + 2, widest = std::max(ic, oc);
    t.across = (w + o.tile - 1) / o.tile, t.down = (h + o.tile - 1) / o.tile, t.each = t.across * t.down;
    t.points = n * n;
    t.at_once = std::max<long>(SIDE_BY_SIDE, FEW_BYTES / (t.points * widest * lanes * 4) / SIDE_BY_SIDE * SIDE_BY_SIDE);
    t.at_once = std::min(t.at_once, up_to(t.each * blocks, SIDE_BY_SIDE));
    t.some = std::min<long>(t.at_once, 4 * SIDE_BY_SIDE);
    t.outputs = 6 * lanes;
    t.inputs = widest * t.at_once * lanes + SKEW;
    t.kernels = up_to(widest, lanes) * t.outputs + SKEW;
    t.products = t.outputs * std::max(t.some, t.at_once) * lanes + SKEW;
    t.turned = padded(widest) * t.at_once * lanes + SKEW;
    return t;
}

int64_t root(const Program* p, int64_t v) {
    while (p->values[v].of >= 0) v = p->values[v].of;
    return v;
}

Conv* prepare(Program* p, const Op& o) {
    const Value &in = p->values[o.in], &out = p->values[o.out];
    const long L = p->lanes;
    Conv* c = (Conv*)get(p, sizeof(Conv));
    c->ic = in.c / o.groups, c->oc = out.c / o.groups;
    c->oh = (in.h + 2 * o.py - o.dy * (o.kh - 1) - 1) / o.sy + 1;
    c->ow = (in.w + 2 * o.px - o.dx * (o.kw - 1) - 1) / o.sx + 1;
    c->rows = out.h, c->cols = out.w;
    c->units = c->rows * c->cols, c->taps = c->ic * o.kh * o.kw;
    const long rs = row_size(in, L), cs = channel_size(in, L);
    const long start = (in.pad - o.py) * rs + (in.pad - o.px) * L;
    const long f = o.pool ? 2 : 1, ors = row_size(out, L);
    c->from = (int32_t*)get(p, c->units * 4), c->to = (int32_t*)get(p, c->units * 4);
    for (long y = 0, u = 0; y < c->rows; y++)
        for (long x = 0; x < c->cols; x++, u++) {
            c->from[u] = start + y * f * o.sy * rs + x * f * o.sx * L;
            c->to[u] = (y + out.pad) * ors + (x + out.pad) * L;
        }
    c->tap = (Tap*)get(p, c->taps * sizeof(Tap));
    for (long i = 0, t = 0; i < c->ic; i++)
        for (long y = 0; y < o.kh; y++)
            for (long x = 0; x < o.kw; x++, t++) c->tap[t] = {int32_t(i * cs + y * o.dy * rs + x * o.dx * L), int32_t(t)};
    const long weights = out.c * c->taps;
    c->together = o.tile || (c->ic >= 2 * L && (c->oh * c->ow <= 64 || weights * L * 4 > (1 << 20)));
    if (o.tile) {
        c->forth = tiles_of(o, c->ic, c->oc, c->oh, c->ow, p->blocks, L);
        c->back = tiles_of(o, c->oc, c->ic, in.h, in.w, p->blocks, L);
    }

    // Backward: an input position gets something from those outputs that read it.
    const long drs = (c->ow + 2 * EDGE) * L, dcs = c->oh * drs;
    std::map<std::tuple<long, long, std::vector<long>, std::vector<long>>, int> known;
    std::vector<Cell> cells;
    std::vector<Taps> lists;
    c->row = (int32_t*)get(p, (in.h + 1) * 4);
    for (long y = 0; y < in.h; y++) {
        c->row[y] = cells.size();
        const long Y = y + o.py;
        std::vector<long> ky;
        for (long k = 0; k < o.kh; k++) {
            const long at = Y - k * o.dy;
            if (at >= 0 && at % o.sy == 0 && at / o.sy < c->oh) ky.push_back(k);
        }
        for (long phase = 0; phase < o.sx; phase++) {
            std::vector<long> xs;
            for (long x = 0; x < in.w; x++) if ((x + o.px) % o.sx == phase) xs.push_back(x);
            for (size_t a = 0; a < xs.size(); a += 4) {
                const long n = std::min<long>(4, xs.size() - a), X = xs[a] + o.px;
                std::vector<long> kx;
                for (long k = 0; k < o.kw; k++) {
                    const long at = X - k * o.dx;
                    if ((at % o.sx + o.sx) % o.sx) continue;
                    const long first = at >= 0 ? at / o.sx : -((-at) / o.sx);
                    if (first + n - 1 >= 0 && first < c->ow) kx.push_back(k);
                }
                auto key = std::make_tuple(Y % o.sy, phase, ky, kx);
                auto found = known.find(key);
                if (found == known.end()) {
                    Taps list{nullptr, int32_t(c->oc * ky.size() * kx.size())};
                    list.first = (Tap*)get(p, list.count * sizeof(Tap) + 1);
                    long t = 0;
                    for (long i = 0; i < c->oc; i++)
                        for (long b : ky)
                            for (long d : kx) {
                                const long down = (Y % o.sy - b * o.dy) / o.sy, right = (phase - d * o.dx) / o.sx;
                                list.first[t++] = {int32_t(i * dcs + down * drs + right * L), int32_t((i * o.kh + b) * o.kw + d)};
                            }
                    found = known.emplace(key, int(lists.size())).first;
                    lists.push_back(list);
                }
                cells.push_back({int32_t((y * in.w + xs[a]) * L), int32_t(Y / o.sy * drs + (EDGE + X / o.sx) * L),
                                 int32_t(o.sx * L), int32_t(n), found->second});
            }
        }
    }
    c->row[in.h] = cells.size();
    c->cells = (Cell*)get(p, cells.size() * sizeof(Cell) + 1);
    memcpy(c->cells, cells.data(), cells.size() * sizeof(Cell));
    c->lists = (Taps*)get(p, lists.size() * sizeof(Taps) + 1);
    memcpy(c->lists, lists.data(), lists.size() * sizeof(Taps));
    return c;
}

// Gradients are needed from the first reader (going back) to the maker of a value: places that are free
// again are used again.
void place_gradients(Program* p) {
    struct Hole { long at, size; };
    std::vector<Hole> holes;
    auto& at = *p->grad_at;
    at.assign(p->n_values, -1);
    long end = 0;
    auto take = [&](int64_t v) {
        v = root(p, v);
        if (at[v] >= 0) return;
        const long size = plain_size(p->values[v], p->lanes) * p->blocks;
        for (size_t i = 0; i < holes.size(); i++)
            if (holes[i].size >= size) {
                at[v] = holes[i].at;
                holes[i].at += size, holes[i].size -= size;
                if (!holes[i].size) holes.erase(holes.begin() + i);
                return;
            }
        at[v] = end;
        end += size;
    };
    auto drop = [&](int64_t v) {
        v = root(p, v);
        Hole h{at[v], plain_size(p->values[v], p->lanes) * p->blocks};
        for (bool joined = true; joined;) {
            joined = false;
            for (size_t i = 0; i < holes.size(); i++)
                if (holes[i].at + holes[i].size == h.at || h.at + h.size == holes[i].at) {
                    h = {std::min(h.at, holes[i].at), h.size + holes[i].size};
                    holes.erase(holes.begin() + i);
                    joined = true;
                    break;
                }
        }
        holes.push_back(h);
    };
    for (int i = 0; i < p->n_out; i++) take(p->out[i]);
    for (int i = p->n_ops - 1; i >= 0; i--) {
        const Op& o = p->ops[i];
        if (at[root(p, o.out)] < 0) continue;
        if (o.needs) take(o.in);
        if (o.in2 >= 0 && o.needs2) take(o.in2);
        drop(o.out);
    }
    p->grad_size = end;
}

float** pointers(Program* p, int n) { return (float**)get(p, n * sizeof(void*)); }

// Data (or their derivatives) of all values.
void place_values(Program* p, float** x) {
    for (int v = 0; v < p->n_values; v++) {
        if (p->values[v].of >= 0) x[v] = x[root(p, v)];
        else x[v] = (float*)get(p, block_size(p->values[v], p->lanes) * p->blocks * 4);
    }
}

// The same where nothing goes back: what nobody reads any more makes room for values of the same form, whose border is where its was.
void place_passing(Program* p, float** x) {
    std::vector<int> last(p->n_values, -1);
    for (int i = 0; i < p->n_ops; i++)
        for (int64_t v : {p->ops[i].in, p->ops[i].in2})
            if (v >= 0) last[root(p, v)] = i;
    for (int k = 0; k < p->n_out; k++) last[root(p, p->out[k])] = p->n_ops;
    last[0] = p->n_ops;
    std::map<std::tuple<long, long, long, long>, std::vector<float*>> free;
    auto form = [&](int v) { const Value& u = p->values[v]; return std::make_tuple(u.c, u.h, u.w, u.pad); };
    auto place = [&](int v) {
        auto& there = free[form(v)];
        if (x[v]) return;
        if (there.empty()) there.push_back((float*)get(p, block_size(p->values[v], p->lanes) * p->blocks * 4));
        x[v] = there.back();
        there.pop_back();
    };
    place(0);
    for (int i = 0; i < p->n_ops; i++) {
        place(root(p, p->ops[i].out));
        for (int v = 0; v < p->n_values; v++)
            if (last[v] == i) free[form(v)].push_back(x[v]);
    }
    for (int v = 0; v < p->n_values; v++) x[v] = x[root(p, v)];
}

void point_gradients(Program* p, float** g) {
    float* all = (float*)get(p, (p->grad_size + p->lanes) * 4);
    for (int v = 0; v < p->n_values; v++) {
        const long at = (*p->grad_at)[root(p, v)];
        g[v] = at < 0 ? nullptr : all + at;
    }
}

}  // namespace

#if defined(__x86_64__)
#define LANES 8
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "kernels.cpp"
#undef LANES
#undef ISA
#undef TARGET
#define LANES 16
#define ISA avx512
#define TARGET __attribute__((target("avx512f,fma")))
#include "kernels.cpp"
#undef LANES
#undef ISA
#undef TARGET
#endif
#define LANES 4  // vectors that every architecture has; on ARM they are NEON's
#define ISA plain
#define TARGET
#include "kernels.cpp"

namespace {
enum Isa { PLAIN, AVX2, AVX512, N_ISA };
struct Table {
    void (*load)(Program*, const void*, int, const int64_t*, int, const float*, const float*, const uint8_t*, const int32_t*, int);
    void (*forward)(Program*, float*, int);
    void (*logits)(Program*, float*);
    void (*backward)(Program*, float*, float*, int);
    void (*put)(Program*, const float*);
    double (*loss)(Program*, const int64_t*, float);
    void (*along)(Program*, float*, const float*, const int64_t*, float*, float*);
    void (*mask)(Program*, int, const float*);
    void (*read)(const Program*, int, float*, long);
    void (*add_up)(const Program*, int, double*);
    void (*descend)(float*, const float*, long, long, const Update&, const Rates&);
    void (*bend)(const float*, float*, long, const Update&);
    double (*squares)(const float*, long);
    void (*spread)(const float*, long, long, long, const double*, double*);
    void (*weigh)(const float*, long, long, long, const double*, double*);
};
#define TABLE(isa) {isa::load, isa::forward, isa::logits, isa::backward, isa::put, isa::loss, isa::along, isa::mask, isa::read, isa::add_up, isa::descend, isa::bend, isa::squares, isa::spread, isa::weigh}
#if defined(__x86_64__)
const Table tables[] = {TABLE(plain), TABLE(avx2), TABLE(avx512)};
const int lanes_of[] = {4, 8, 16};
#else
const Table tables[] = {TABLE(plain)};
const int lanes_of[] = {4};
#endif
const Table& of(const Program* p) { return tables[p->isa]; }

// The constants of an update's next step. Its count goes up; what needs many digits is computed in double precision.
Rates rates_of(const Update& u, double squares) {
    Rates r{};
    r.lr = u.lr, r.momentum = u.momentum, r.decay = u.kind == ADAMW ? 0 : u.decay, r.eps = u.eps;
    r.keep = u.kind == ADAMW ? 1 - u.lr * u.decay : 1;
    r.share = std::isinf(u.clip) ? 1.f : std::min(1.f, (float)u.clip / ((float)std::sqrt(squares) + 1e-6f));
    if (u.kind == ADAM || u.kind == ADAMW) {
        const double count = *u.count += 1;
        r.new1 = 1 - u.beta1, r.beta2 = u.beta2, r.new2 = 1 - u.beta2;
        r.rate = (float)u.lr / (float)(1 - std::pow(u.beta1, count));
        r.root = 1 / std::sqrt(1 - std::pow(u.beta2, count));
    }
    return r;
}

// The next images come from anywhere in memory: they are asked for while this step computes, if they are few.
void expect(const Program* p, const void* images, int kind, const int64_t* at, long n) {
    const Value& v = p->values[0];
    const long size = v.c * v.h * v.w * (kind ? 1 : 4);
    if (n * size > 4 * CACHE) return;
    for (long i = 0; i < n; i++) {
        const char* from = (const char*)images + at[i] * size;
        for (long k = 0; k < size; k += 64) __builtin_prefetch(from + k, 0, 2);
        __builtin_prefetch(from + size - 1, 0, 2);
    }
}

void update(int isa, float* W, const float* G, long n, const Update& u) {
    const Table& t = tables[isa];
    t.descend(W, G, 0, n, u, rates_of(u, std::isinf(u.clip) ? 0 : t.squares(G, n)));
}

// Which linear layers have weights that no other operation learns: their gradient is whole as soon as it is there.
void find_alone(Program* p) {
    auto& alone = *p->alone;
    alone.assign(p->n_ops, 0);
    for (int i = 0; i < p->n_ops; i++) {
        const Op& o = p->ops[i];
        if (o.kind != LINEAR || !o.learns || !p->g[o.out]) continue;
        const Value& in = p->values[o.in];
        const long end = o.weight + in.c * in.h * in.w * p->values[o.out].c;
        bool mine = true;
        for (int j = 0; j < p->n_ops; j++) {
            const Op& other = p->ops[j];
            if (j == i || (other.kind != CONV && other.kind != LINEAR && other.kind != NORM)) continue;
            for (long at : {other.weight, other.bias}) mine &= at < o.weight || at >= end;
        }
        alone[i] = mine;
    }
}
}  // namespace

extern "C" {

// Which instruction sets can be run here, as bits: 1 plain vectors of four (NEON on ARM), 2 AVX2, 4 AVX-512.
int fl_supported() {
#if defined(__x86_64__)
    int found = 1;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found |= 2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("fma")) found |= 4;
    return found;
#else
    return 1;
#endif
}

// Whether this CPU's units for AVX-512 are as wide as its vectors: Intel's since Ice Lake, AMD's since Zen 5, told by
// instructions that came with them. Earlier ones of Intel lower their clock for AVX-512, and AMD's Zen 4 takes two turns
// for a vector.
int fl_wide() {
#if defined(__x86_64__)
    if (!(fl_supported() & 4)) return 0;
    return __builtin_cpu_is("intel") ? __builtin_cpu_supports("avx512vbmi2") != 0
                                     : __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512vp2intersect");
#else
    return 0;
#endif
}

long fl_sizes(int which) {
    const long sizes[] = {sizeof(Op), sizeof(Value), sizeof(Update), sizeof(Batches)};
    return sizes[which];
}

void fl_free(Program* p) {
    for (void* m : *p->owned) free(m);
    delete p->owned;
    delete p->grad_at;
    delete p->alone;
    delete p;
}

Program* fl_make(int isa, const Op* ops, int n_ops, const Value* values, int n_values, const int64_t* out, int n_out, long batch) {
    Program* p = new (std::nothrow) Program();
    if (!p) return nullptr;
    p->owned = new std::vector<void*>;
    p->grad_at = new std::vector<long>;
    p->alone = new std::vector<char>;
    try {
        p->isa = isa, p->lanes = lanes_of[isa], p->n_ops = n_ops, p->n_values = n_values, p->n_out = n_out;
        p->blocks = (batch + p->lanes - 1) / p->lanes;
        const long L = p->lanes;
        p->ops = (Op*)get(p, n_ops * sizeof(Op));
        memcpy(p->ops, ops, n_ops * sizeof(Op));
        p->values = (Value*)get(p, n_values * sizeof(Value));
        memcpy(p->values, values, n_values * sizeof(Value));
        p->out = (int64_t*)get(p, n_out * 8);
        memcpy(p->out, out, n_out * 8);
        p->conv = (Conv**)pointers(p, n_ops);
        p->stat = pointers(p, n_ops), p->rstat = pointers(p, n_ops), p->mask = pointers(p, n_ops);
        p->arg = (int32_t**)pointers(p, n_ops);
        p->x = pointers(p, n_values), p->g = pointers(p, n_values);
        p->rx = pointers(p, n_values), p->rg = pointers(p, n_values);
        p->watched = (double**)pointers(p, n_values);
        bool back = false;
        for (int i = 0; i < n_ops; i++) back |= p->ops[i].learns || p->ops[i].needs || p->ops[i].needs2;
        if (back) place_values(p, p->x);
        else place_passing(p, p->x);
        place_gradients(p);
        point_gradients(p, p->g);
        find_alone(p);
        long delta = 0, packed = 0, sums = 0, turned = 0, channels = 0, sets = 0, inputs = 0, kernels = 0, products = 0;
        for (int i = 0; i < n_ops; i++) {
            const Op& o = p->ops[i];
            const Value &in = p->values[o.in], &v = p->values[o.out];
            if (o.kind == CONV) {
                Conv* c = p->conv[i] = prepare(p, o);
                const long blocks = c->together ? p->blocks : 1, weights = v.c * c->taps;
                delta = std::max(delta, blocks * v.c * c->oh * (c->ow + 2 * EDGE) * L);
                packed = std::max(packed, weights);
                if (!c->together) sums = std::max(sums, weights * L);
                else turned = std::max(turned, p->blocks * channel_size(in, L) * ((c->ic + 2 * L - 1) / (2 * L) * 2 * L));
                if (o.pool) p->arg[i] = (int32_t*)get(p, plain_size(v, L) * p->blocks * 4);
                channels = std::max<long>(channels, 2 * v.c * L);
                if (o.tile)
                    for (const Tiles& t : {c->forth, c->back}) {
                        inputs = std::max(inputs, t.points * std::max(t.inputs, t.turned));
                        kernels = std::max(kernels, t.points * t.kernels + L);
                        products = std::max(products, t.points * t.products);
                    }
            } else if (o.kind == LINEAR) {
                const long size = padded(in.c * in.h * in.w) * L * p->blocks;
                turned = std::max(turned, size);
                if (o.learns && !p->rows && !root(p, o.in) && !p->values[0].pad) p->rows = (float*)get(p, size * 4);
            } else if (o.kind == MAXPOOL) {
                p->arg[i] = (int32_t*)get(p, plain_size(v, L) * p->blocks * 4);
            } else if (o.kind == NORM) {
                const long of = o.batch ? v.c : o.groups * p->blocks;
                p->stat[i] = (float*)get(p, of * 4 * L * 4);
                sets = std::max<long>(sets, (4 * of + 2 * v.c) * L);
            } else if (o.kind == DROPOUT) {
                p->mask[i] = (float*)get(p, plain_size(v, L) * p->blocks * 4);
            }
        }
        if (!back) delta = sums = turned = 0;
        p->delta_size = delta, p->packed_size = packed;
        p->delta = (float*)get(p, (delta + L) * 4);
        p->packed = (float*)get(p, packed * 4);
        p->channel_sums = (float*)get(p, channels * 4);
        p->set_sums = (float*)get(p, sets * 4);
        p->sums = (float*)get(p, (sums + L) * 4);
        p->turned = (float*)get(p, turned * 4 + 64);
        p->few_inputs = (float*)get(p, inputs * 4, false);
        p->few_kernels = (float*)get(p, kernels * 4);
        p->few_products = (float*)get(p, products * 4, false);
    } catch (...) {
        fl_free(p);
        return nullptr;
    }
    return p;
}

long fl_bytes(const Program* p) { return p->bytes; }

// Images at these places (`at`, or 0 to n - 1) of an array of rows: uint8 (kind 1) or float32 (0), value j
// times scale[j] less shift[j]; flipped, and cut out of themselves with a border of raw zeros.
void fl_load(Program* p, const void* images, int kind, const int64_t* at, int n, const float* scale, const float* shift,
             const uint8_t* flip, const int32_t* offset, int crop) {
    of(p).load(p, images, kind, at, n, scale, shift, flip, offset, crop);
}

void fl_mask(Program* p, int op, const float* mask) { of(p).mask(p, op, mask); }

// Outputs of the loaded batch, (outputs, n, classes). `update`: norms move their running statistics in W.
void fl_forward(Program* p, float* W, int update, float* out) {
    of(p).forward(p, W, update);
    if (out) of(p).logits(p, out);
}

// Outputs of n samples, (outputs, n, classes): as many samples at a time as there is memory for.
void fl_look(Program* p, float* W, const void* images, int kind, const int64_t* at, long n, const float* scale, const float* shift,
             const uint8_t* flip, const int32_t* offset, int crop, float* out) {
    const long size = p->blocks * p->lanes, classes = p->values[p->out[0]].c;
    for (long a = 0; a < n; a += size) {
        const long some = std::min(size, n - a), next = std::min(size, n - a - some);
        of(p).load(p, images, kind, at + a, some, scale, shift, flip ? flip + a : nullptr, offset ? offset + 2 * a : nullptr, crop);
        expect(p, images, kind, at + a + some, next);
        of(p).forward(p, W, 0);
        for (int k = 0; k < p->n_out; k++) of(p).read(p, p->out[k], out + (k * n + a) * classes, classes);
    }
}

// A value of the batch that went forward last, (n, features), in rows that are `stride` apart.
void fl_read(const Program* p, int value, float* to, long stride) { of(p).read(p, value, to, stride); }

// The same, added up over samples and positions: what each channel has, added to `to`.
void fl_add_up(const Program* p, int value, double* to) { of(p).add_up(p, value, to); }

// From now on, going back adds the gradient of this value, summed over samples, to the c * h * w numbers at `to` (null: no longer).
// Returns 0 if no gradient gets there.
int fl_watch(Program* p, int value, double* to) {
    p->watched[value] = to;
    return p->g[value] != nullptr;
}

// From d(loss)/d(outputs) of the batch that went forward last to d(loss)/d(W).
void fl_backward(Program* p, float* W, float* G, const float* d, int add) {
    of(p).put(p, d);
    of(p).backward(p, W, G, add);
}

// From now on the loss sees only the logits of the classes that `held` marks (null: of all); others are taken for 0 (`as_zero`) or
// minus infinity.
void fl_hold(Program* p, const uint8_t* held, int as_zero) { p->held = held, p->as_zero = as_zero; }

// The mean cross-entropy of the loaded batch times `share`, and its gradient.
double fl_gradient(Program* p, float* W, float* G, const int64_t* y, float share, int update, int add) {
    of(p).forward(p, W, update);
    const double loss = of(p).loss(p, y, share);
    of(p).backward(p, W, G, add);
    return loss;
}

// Memory for derivatives along a direction, if there is any.
static bool room_along(Program* p) {
    if (p->rdelta) return true;
    try {
        place_values(p, p->rx);
        point_gradients(p, p->rg);
        for (int i = 0; i < p->n_ops; i++)
            if (p->ops[i].kind == NORM) {
                const Op& o = p->ops[i];
                p->rstat[i] = (float*)get(p, 4L * p->lanes * 4 * (o.batch ? p->values[o.out].c : o.groups * p->blocks));
            }
        p->packed2 = (float*)get(p, p->packed_size * 4);
        p->rdelta = (float*)get(p, (p->delta_size + p->lanes) * 4);
    } catch (...) {
        return false;
    }
    return true;
}

// Along the direction V, for the batch that went forward last: the derivative of the outputs (into `out`), and
// of d(d . outputs)/d(W) (into G). Returns 0 if there is no memory for it.
int fl_along(Program* p, float* W, const float* V, const float* d, float* out, float* G) {
    if (!room_along(p)) return 0;
    of(p).put(p, d);
    of(p).along(p, W, V, nullptr, out, G);
    return 1;
}

// Weights follow a gradient.
void fl_update(int isa, float* W, const float* G, long n, const Update* u) { update(isa, W, G, n, *u); }

// Of n rows of weights: how far each is from their mean, by these shares, squared, added to `squares`.
void fl_spread(int isa, const float* rows, long stride, long n, long size, const double* shares, double* squares) {
    tables[isa].spread(rows, stride, n, size, shares, squares);
}

// Σ weight_k row_k of n rows, in the order of the rows, added to `sums`.
void fl_weigh(int isa, const float* rows, long stride, long n, long size, const double* weights, double* sums) {
    tables[isa].weigh(rows, stride, n, size, weights, sums);
}

// The same of one row's values at n places: they count, and so does their weight.
void fl_weigh_part(const float* row, const int64_t* at, long n, double weight, double* sums, double* coverage) {
    for (long j = 0; j < n; j++) sums[at[j]] += weight * row[at[j]], coverage[at[j]] += weight;
}

// Steps one after the other: step k takes the samples at[cut[k]] to at[cut[k + 1] - 1]. G is the last one's gradient. Returns
// the sum of the samples' losses.
double fl_train(Program* p, float* W, float* G, long trainable, const void* images, int kind, const int64_t* at, const int64_t* y,
                const int64_t* cut, int steps, const float* scale, const float* shift, const uint8_t* flip, const int32_t* offset,
                int crop, const Update* u) {
    double sum = 0;
    // A tile of a gradient that is whole can go into the weights straight from registers; not where its norm must be known.
    const bool bent = u->to || u->push, soon = u->kind == SGD && std::isinf(u->clip) && !bent;
    if (soon) p->rates = rates_of(*u, 0);
    for (int k = 0; k < steps; k++) {
        const long a = cut[k], n = cut[k + 1] - a;
        of(p).load(p, images, kind, at + a, n, scale, shift, flip ? flip + a : nullptr, offset ? offset + 2 * a : nullptr, crop);
        if (k + 1 < steps) expect(p, images, kind, at + cut[k + 1], cut[k + 2] - cut[k + 1]);
        p->at_once = soon && k + 1 < steps ? u : nullptr;
        sum += n * fl_gradient(p, W, G, y + a, 1, 1, 0);
        if (!p->at_once) {
            if (bent) of(p).bend(W, G, trainable, *u);
            update(p->isa, W, G, trainable, *u);
            continue;
        }
        // What is left: between the weights that have moved already.
        long from = 0;
        while (from < trainable) {
            long to = trainable, next = trainable;
            for (int i = 0; i < p->n_ops; i++) {
                const Op& o = p->ops[i];
                if (!(*p->alone)[i] || o.weight < from || o.weight > to) continue;
                const Value& in = p->values[o.in];
                to = o.weight, next = o.weight + in.c * in.h * in.w * p->values[o.out].c;
            }
            of(p).descend(W, G, from, to, *u, p->rates);
            from = next;
        }
        p->at_once = nullptr;
    }
    return sum;
}

static const int64_t* load_batches(Program* p, const Batches& b, long first, long after) {
    const long a = b.cut[first];
    of(p).load(p, b.images, b.kind, b.at + a, b.cut[after] - a, b.scale, b.shift, b.flip ? b.flip + a : nullptr,
               b.offset ? b.offset + 2 * a : nullptr, b.crop);
    return b.y + a;
}

// A step of meta-learning, for nets whose samples do not depend on one another. Inner steps w[k + 1] = w[k] - rate . dL/dw[k], one for
// each batch of `support`; then the gradient of the mean of the losses of `query`'s batches at the last w, with respect to w[0] (into G)
// and, if GR, to the rates. Rates are of each weight or (if there are none) `rate`. W is a row of `size` values, whose first n are w[0];
// `rows` and `grads` have room for a row and a gradient of each inner step, `turn` for two of n. Without `second`, inner gradients are
// taken for constants. Returns the mean loss, -1 if there is no memory.
double fl_meta(Program* p, float* W, long size, long n, const float* rates, float rate, int second, const Batches* support,
               const Batches* query, float* rows, float* grads, float* turn, float* G, float* GR) {
    if (second && !room_along(p)) return -1;
    const long steps = support->number, most = p->blocks * p->lanes;
    float* w = W;
    for (long k = 0; k < steps; k++) {
        float *next = rows + k * size, *g = grads + k * n;
        fl_gradient(p, w, g, load_batches(p, *support, k, k + 1), 1, 0, 0);
        for (long i = 0; i < n; i++) next[i] = w[i] - (rates ? rates[i] : rate) * g[i];
        memcpy(next + n, W + n, (size - n) * 4);
        w = next;
    }
    double loss = 0;
    for (long k = 0, after; k < query->number; k = after) {  // batches of one size go together
        const int64_t* cut = query->cut;
        const long each = cut[k + 1] - cut[k];
        for (after = k + 1; after < query->number && cut[after + 1] - cut[after] == each && cut[after + 1] - cut[k] <= most;) after++;
        loss += fl_gradient(p, w, G, load_batches(p, *query, k, after), (float)(after - k) / query->number, 0, k > 0);
    }
    float *v = turn, *along = turn + n;
    for (long k = steps - 1; k >= 0; k--) {
        const float* g = grads + k * n;
        if (GR)
            for (long i = 0; i < n; i++) GR[i] -= g[i] * G[i];
        if (!second) continue;
        for (long i = 0; i < n; i++) v[i] = (rates ? rates[i] : rate) * G[i];
        float* at = k ? rows + (k - 1) * size : W;
        const int64_t* y = load_batches(p, *support, k, k + 1);
        of(p).forward(p, at, 0);
        of(p).loss(p, y, 1);
        of(p).along(p, at, v, y, nullptr, along);
        for (long i = 0; i < n; i++) G[i] -= along[i];
    }
    return loss;
}

}  // extern "C"

#else  // LANES: compiled for one instruction set

#undef FN
#undef INLINE
#define FN TARGET
#define INLINE TARGET inline __attribute__((always_inline))

namespace {
namespace ISA {

constexpr long L = LANES;
typedef float vf __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), may_alias));

INLINE vf ld(const float* p) { return *(const vf*)p; }
INLINE void st(float* p, vf v) { *(vf*)p = v; }
INLINE vf all(float f) { return f - vf{}; }  // less 0, which is folded away: plus 0 is not
INLINE float total(vf v) {  // in pairs: short chains
    float s[L];
    UNROLL for (int l = 0; l < L; l++) s[l] = v[l];
    UNROLL for (int half = L / 2; half > 0; half /= 2)
        UNROLL for (int l = 0; l < half; l++) s[l] += s[l + half];
    return s[0];
}
INLINE vf relu(vf v) { return v < vf{} ? vf{} : v; }  // NaN stays NaN

// Outputs are computed three at a time, the rest as 2 + 2, 2 or 1.
INLINE long tile(long left) { return left > 4 || left == 3 ? 3 : left == 4 ? 2 : left; }

// In products of matrices AVX-512, which has twice as many registers, takes six.
constexpr int TALL = LANES == 16 ? 6 : 3;
INLINE long tall(long left) { return TALL > 3 && left >= TALL ? TALL : tile(left); }

FN long blocks_of(const Program* p) { return (p->n + L - 1) / L; }

// 1 for samples that are there, 0 for the lanes that fill up the last block.
FN vf present(const Program* p, long block) {
    vf m = {};
    for (int l = 0; l < L; l++) m[l] = block * L + l < p->n ? 1.f : 0.f;
    return m;
}

// ---- functions of a vector

INLINE vf exp_of(vf x) {
    x = x > all(88.3762626647949f) ? all(88.3762626647949f) : x;
    x = x < all(-87.3365447505f) ? all(-87.3365447505f) : x;
    const vf n = (x * all(1.44269504088896341f) + all(12582912.f)) - all(12582912.f);
    const vf r = x - n * all(0.693359375f) + n * all(2.12194440e-4f);
    vf p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * (r * r) + r + all(1.f);
    const vi bits = (__builtin_convertvector(n, vi) + 127) << 23;
    return p * (vf)bits;
}
INLINE vf sigmoid_of(vf x) { return all(1.f) / (all(1.f) + exp_of(-x)); }
INLINE vf tanh_of(vf x) {
    const vf a = x < vf{} ? -x : x;
    const vf e = exp_of(all(-2.f) * a);
    const vf big = (all(1.f) - e) / (all(1.f) + e), s = x * x;
    // Near 0 the difference would lose digits: a series does not.
    vf q = all(62.f / 2835);
    q = q * s + all(-17.f / 315);
    q = q * s + all(2.f / 15);
    q = q * s + all(-1.f / 3);
    q = q * s + all(1.f);
    return a < all(0.25f) ? x * q : x < vf{} ? -big : big;
}
INLINE vf erf_of(vf x) {  // Abramowitz and Stegun 7.1.26, to 1.5e-7
    const vf a = x < vf{} ? -x : x;
    const vf t = all(1.f) / (all(1.f) + all(0.3275911f) * a);
    vf p = all(1.061405429f);
    p = p * t + all(-1.453152027f);
    p = p * t + all(1.421413741f);
    p = p * t + all(-0.284496736f);
    p = p * t + all(0.254829592f);
    const vf y = all(1.f) - p * t * exp_of(-a * a);
    return x < vf{} ? -y : y;
}

struct Curve { vf f, d, dd; };  // a function, its first and second derivative

INLINE Curve curve(int64_t kind, vf x, float slope) {
    const vf one = all(1.f);
    switch (kind) {
        case RELU: return {relu(x), x > vf{} ? one : vf{}, vf{}};
        case LEAKY: { const vf d = x > vf{} ? one : all(slope); return {x * d, d, vf{}}; }
        case TANH: { const vf t = tanh_of(x), d = one - t * t; return {t, d, all(-2.f) * t * d}; }
        case SIGMOID: { const vf s = sigmoid_of(x), d = s * (one - s); return {s, d, d * (one - s - s)}; }
        case SILU: {
            const vf s = sigmoid_of(x), d = s * (one - s), dd = d * (one - s - s);
            return {x * s, s + x * d, d + d + x * dd};
        }
        case GELU: {
            const vf area = all(.5f) * (one + erf_of(x * all(0.70710678118654752f)));
            const vf bell = all(0.3989422804014327f) * exp_of(all(-.5f) * x * x);
            return {x * area, area + x * bell, bell * (all(2.f) - x * x)};
        }
        default: {  // GELU by tanh
            const vf k = all(0.7978845608028654f), a = all(0.044715f);
            const vf t = tanh_of(k * (x + a * x * x * x)), u = k * (one + all(3.f) * a * x * x), v = k * all(6.f) * a * x;
            const vf s = one - t * t, ds = all(-2.f) * t * s * u;
            return {all(.5f) * x * (one + t), all(.5f) * (one + t + x * s * u), s * u + all(.5f) * x * (ds * u + s * v)};
        }
    }
}

// ---- convolutions

// acc[o][p] += w[tap][o] * in[tap + at[p]]. One long loop: nested short ones cost a missed branch each.
template <int O, int P>
INLINE void conv_tile(const float* in, const long* at, const Tap* tap, const Tap* end, const float* w, vf (&acc)[O][P]) {
    for (; tap != end; tap++) {
        const float *r = in + tap->in, *ww = w + (long)tap->w * O;
        vf b[O];
        UNROLL for (int o = 0; o < O; o++) b[o] = all(ww[o]);
        UNROLL for (int p = 0; p < P; p++) {
            const vf v = ld(r + at[p]);
            UNROLL for (int o = 0; o < O; o++) acc[o][p] += b[o] * v;
        }
    }
}

// Kernels in the order in which tiles read them: [group][tile of outputs][tap][output]; `back`: with inputs and
// outputs in each other's place.
FN void pack(const Op& op, const Conv& c, const float* W, bool back, float* to) {
    const long n = back ? c.ic : c.oc, m = back ? c.oc : c.ic;
    for (long g = 0; g < op.groups; g++) {
        const float* w = W + op.weight + g * c.oc * op.so;
        for (long o = 0, t; o < n; o += t) {
            t = tile(n - o);
            for (long i = 0; i < m; i++)
                for (long y = 0; y < op.kh; y++)
                    for (long x = 0; x < op.kw; x++)
                        for (long k = o; k < o + t; k++)
                            *to++ = w[(back ? i : k) * op.so + (back ? k : i) * op.si + y * op.sky + x * op.skx];
        }
    }
}

struct Side {  // what a tile reads: an input, the kernels for it, and the strides of both sides
    const float *in, *w;
};
struct Strides { long in_block, in_row, out_channel, out_block, arg_block; };

// The largest of four, and which it is (-1: a ReLU behind it cuts it off).
INLINE vf largest(const vf (&v)[4], bool cut, vi& which) {
    vf m = v[0];
    which = vi{};
    UNROLL for (int p = 1; p < 4; p++) {
        const vi over = (v[p] > m) | (v[p] != v[p]);
        m = over ? v[p] : m;
        which = over ? vi{} + p : which;
    }
    if (!cut) return m;
    const vi off = m <= vf{};
    which = off ? vi{} - 1 : which;
    return off ? vf{} : m;
}

// Some units for O outputs. ALONG: the derivative along a direction, in which two inputs meet two kernels, and
// what was the largest, or was cut off, stays that.
template <int O, bool ALONG>
FN void conv_units(const Op& op, const Conv& c, Side a, Side b, const float* bias, float* out, const float* made, int32_t* arg,
                   const Strides& s, long u, long end, const Tap* first, const Tap* last) {
    const bool begins = first == c.tap, ends = last == c.tap + c.taps;
    const vf scale = all(ends ? op.scale : 1.);
    const long right = op.sx * L, down = op.sy * s.in_row;
    while (u < end) {
        const int n = op.pool ? 1 : end - u < 4 ? end - u : 4;
        long at[4], to[4] = {};
        if (op.pool) {
            const long q = u / c.units, r = u % c.units, from = q * s.in_block + c.from[r];
            at[0] = from, at[1] = from + right, at[2] = from + down, at[3] = from + down + right;
            to[0] = q * s.out_block + c.to[r];
        } else {
            UNROLL for (int p = 0; p < 4; p++) {
                const long k = p < n ? u + p : u, q = k / c.units, r = k % c.units;
                at[p] = q * s.in_block + c.from[r], to[p] = q * s.out_block + c.to[r];
            }
        }
        vf acc[O][4];
        UNROLL for (int o = 0; o < O; o++) {
            const vf v = all(bias ? bias[o] : 0.f);
            UNROLL for (int p = 0; p < 4; p++) acc[o][p] = begins ? v : ld(out + o * s.out_channel + to[p]);
        }
        conv_tile<O, 4>(a.in, at, first, last, a.w, acc);
        if (ALONG) conv_tile<O, 4>(b.in, at, first, last, b.w, acc);
        if (op.pool) {
            const long q = u / c.units, r = u % c.units;
            UNROLL for (int o = 0; o < O; o++) {
                vi* place = (vi*)(arg + q * s.arg_block + (o * c.units + r) * L);
                vf m = acc[o][0] * scale;
                if (ALONG) {
                    const vi which = *place;
                    m = which == 0 ? m : vf{};
                    UNROLL for (int p = 1; p < 4; p++) m = which == p ? acc[o][p] * scale : m;
                } else {
                    vi which;
                    const vf four[4] = {acc[o][0] * scale, acc[o][1] * scale, acc[o][2] * scale, acc[o][3] * scale};
                    m = largest(four, op.relu, which);
                    *place = which;
                }
                st(out + o * s.out_channel + to[0], m);
            }
        } else {
            UNROLL for (int o = 0; o < O; o++)
                UNROLL for (int p = 0; p < 4; p++) {
                    if (p >= n) continue;
                    const long z = o * s.out_channel + to[p];
                    vf v = acc[o][p] * scale;
                    if (op.relu && ends) v = ALONG ? (ld(made + z) > vf{} ? v : vf{}) : relu(v);
                    st(out + z, v);
                }
        }
        u += n;
    }
}

template <bool ALONG>
FN void conv_forward(Program* p, int i, const float* W, const float* V) {
    const Op& op = p->ops[i];
    const Conv& c = *p->conv[i];
    const Value &in = p->values[op.in], &out = p->values[op.out];
    const Strides s{block_size(in, L), row_size(in, L), channel_size(out, L), block_size(out, L), plain_size(out, L)};
    pack(op, c, W, false, p->packed);
    if (ALONG) pack(op, c, V, false, p->packed2);
    const float *x = p->x[op.in], *bias = op.bias < 0 ? nullptr : (ALONG ? V : W) + op.bias;
    const long units = blocks_of(p) * c.units;
    // The inputs of a chunk of units stay in the cache while all outputs are computed from them; many kernels should not
    // have to come from far for every chunk.
    const long cache = out.c * c.taps * 4 > 16 * CACHE ? 8 * CACHE : CACHE;
    const long chunk = std::max<long>(16, cache / (std::min<long>(c.ic, CHANNELS) * op.sy * op.sx * L * 4 * (op.pool ? 4 : 1)));
    auto three = conv_units<3, ALONG>, two = conv_units<2, ALONG>, one = conv_units<1, ALONG>;
    // So do the kernels of some input channels; pooled sums are not kept, so those are taken all at once.
    const long some = op.pool ? c.taps : CHANNELS * op.kh * op.kw;
    for (long u = 0; u < units; u += chunk)
        for (long g = 0; g < op.groups; g++)
            for (long first = 0; first < c.taps; first += some)
            for (long o = 0, t; o < c.oc; o += t) {
                t = tile(c.oc - o);
                const long k = g * c.oc + o, w = k * c.taps, from = g * c.ic * channel_size(in, L), to = k * s.out_channel;
                const Side a{(ALONG ? p->rx[op.in] : x) + from, p->packed + w}, b{x + from, ALONG ? p->packed2 + w : nullptr};
                (t == 3 ? three : t == 2 ? two : one)(op, c, a, b, bias ? bias + k : nullptr, (ALONG ? p->rx : p->x)[op.out] + to,
                                                      p->x[op.out] + to, op.pool ? p->arg[i] + k * c.units * L : nullptr, s, u,
                                                      std::min(units, u + chunk), c.tap + first,
                                                      c.tap + std::min(c.taps, first + some));
            }
}

// d(loss)/d(what the convolution gave) of some blocks, with columns of zeros around it; `sums` are its sums by channel.
FN void conv_delta(const Program* p, int i, const float* g, float* delta, long q0, long q1, float* sums) {
    const Op& op = p->ops[i];
    const Conv& c = *p->conv[i];
    const Value& out = p->values[op.out];
    const long rs = (c.ow + 2 * EDGE) * L, cs = c.oh * rs, rows = c.rows, cols = c.cols;
    const long ors = row_size(out, L), ocs = channel_size(out, L), obs = block_size(out, L);
    const vf scale = all(op.scale);
    const bool odd = op.pool && (c.oh % 2 || c.ow % 2);
    for (long q = q0; q < q1; q++)
        for (long k = 0; k < out.c; k++) {
            float* d = delta + ((q - q0) * out.c + k) * cs;
            const float* from = g + (q * out.c + k) * rows * cols * L;
            if (odd) memset(d, 0, cs * 4);
            for (long y = 0; y < c.oh; y++) {
                memset(d + y * rs, 0, EDGE * L * 4);
                memset(d + (y + 1) * rs - EDGE * L, 0, EDGE * L * 4);
            }
            d += EDGE * L;
            vf sum = ld(sums + k * L);
            if (op.pool) {
                const int32_t* arg = p->arg[i] + (q * out.c + k) * c.units * L;
                for (long y = 0; y < rows; y++)
                    for (long x = 0; x < cols; x++, from += L, arg += L) {
                        const vi a = *(const vi*)arg;
                        const vf v = a >= 0 ? ld(from) * scale : vf{};
                        float* to = d + 2 * y * rs + 2 * x * L;
                        st(to, a == 0 ? v : vf{});
                        st(to + L, a == 1 ? v : vf{});
                        st(to + rs, a == 2 ? v : vf{});
                        st(to + rs + L, a == 3 ? v : vf{});
                        sum += v;
                    }
            } else {
                const float* made = p->x[op.out] + q * obs + k * ocs + out.pad * ors + out.pad * L;
                for (long y = 0; y < rows; y++)
                    for (long x = 0; x < cols; x++, from += L) {
                        vf v = ld(from) * scale;
                        if (op.relu) v = ld(made + y * ors + x * L) > vf{} ? v : vf{};
                        st(d + y * rs + x * L, v);
                        sum += v;
                    }
            }
            st(sums + k * L, sum);
        }
}

struct Area { long blocks, rows, cols, d_block, d_channel, d_row, i_block, i_row, i_col; };

// sum[o][t] += Σ delta[o] * in[tap t] over an area of outputs.
template <int O, int T>
FN void weights_tile(const float* delta, const float* in, const long* tap, const Area& a, vf (&acc)[O][T]) {
    for (long q = 0; q < a.blocks; q++)
        for (long y = 0; y < a.rows; y++) {
            const float* d = delta + q * a.d_block + y * a.d_row;
            const float* r[T];
            UNROLL for (int t = 0; t < T; t++) r[t] = in + q * a.i_block + y * a.i_row + tap[t];
            for (long x = 0, z = 0; x < a.cols * L; x += L, z += a.i_col) {
                vf b[O];
                UNROLL for (int o = 0; o < O; o++) b[o] = ld(d + o * a.d_channel + x);
                UNROLL for (int t = 0; t < T; t++) {
                    const vf v = ld(r[t] + z);
                    UNROLL for (int o = 0; o < O; o++) acc[o][t] += b[o] * v;
                }
            }
        }
}

template <int O, int T>
FN void weights_into(const float* delta, const float* in, const long* tap, const Area& a, float* to, long stride) {
    vf acc[O][T];
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int t = 0; t < T; t++) acc[o][t] = ld(to + o * stride + t * L);
    weights_tile<O, T>(delta, in, tap, a, acc);
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int t = 0; t < T; t++) st(to + o * stride + t * L, acc[o][t]);
}

typedef void (*Into)(const float*, const float*, const long*, const Area&, float*, long);
const Into into[3][4] = {{weights_into<1, 1>, weights_into<1, 2>, weights_into<1, 3>, weights_into<1, 4>},
                         {weights_into<2, 1>, weights_into<2, 2>, weights_into<2, 3>, weights_into<2, 4>},
                         {weights_into<3, 1>, weights_into<3, 2>, weights_into<3, 3>, weights_into<3, 4>}};

INLINE float& place(const Op& op, float* G, long k, long t) {  // of output k's tap t
    const long kk = op.kh * op.kw;
    return G[op.weight + k * op.so + t / kk * op.si + t % kk / op.kw * op.sky + t % op.kw * op.skx];
}

// G[o, i..] += Σ delta[o] * turned[..][i..] over an area of outputs, one of whose taps is at `from`.
template <int O>
FN void turned_tile(const float* delta, const float* from, long pitch, const Area& a, float* G, long stride, long step, long valid, bool add) {
    vf acc[O][2];
    UNROLL for (int o = 0; o < O; o++) acc[o][0] = acc[o][1] = vf{};
    for (long q = 0; q < a.blocks; q++)
        for (long y = 0; y < a.rows; y++) {
            const float *d = delta + q * a.d_block + y * a.d_row, *r = from + q * a.i_block + y * a.i_row;
            for (long x = 0; x < a.cols; x++, d += L, r += a.i_col)
                for (long b = 0; b < L; b++) {
                    const vf u = ld(r + b * pitch), v = ld(r + b * pitch + L);
                    UNROLL for (int o = 0; o < O; o++) {
                        const vf k = all(d[o * a.d_channel + b]);
                        acc[o][0] += k * u, acc[o][1] += k * v;
                    }
                }
        }
    if (step == 1 && valid >= 2 * L) {
        UNROLL for (int o = 0; o < O; o++) UNROLL for (int v = 0; v < 2; v++) {
            float* to = G + o * stride + v * L;
            vf was = {};
            if (add) memcpy(&was, to, L * 4);
            was += acc[o][v];
            memcpy(to, &was, L * 4);
        }
        return;
    }
    float sums[O][2 * L];  // not `acc` itself, which would then have to be in memory all the time
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int v = 0; v < 2; v++) memcpy(sums[o] + v * L, &acc[o][v], L * 4);
    for (int o = 0; o < O; o++)
        for (long l = 0; l < std::min(valid, 2 * L); l++) {
            float& to = G[o * stride + l * step];
            to = (add ? to : 0.f) + sums[o][l];
        }
}

// With all blocks at once: samples are laid out as [block][row][column][sample][channel], so that channels fill the vectors
// and nothing has to be summed across them.
FN void weights_turned(Program* p, int i, const float* x, const float* delta, float* G, bool add) {
    const Op& op = p->ops[i];
    const Conv& c = *p->conv[i];
    const Value &in = p->values[op.in], &out = p->values[op.out];
    const long blocks = blocks_of(p), h = in.h + 2 * in.pad, w = in.w + 2 * in.pad, area = h * w, pitch = (c.ic + 2 * L - 1) / (2 * L) * 2 * L;
    const long drs = (c.ow + 2 * EDGE) * L, dcs = c.oh * drs;
    Area a{blocks, c.oh, c.ow, out.c * dcs, dcs, drs, area * L * pitch, op.sy * w * L * pitch, op.sx * L * pitch};
    for (long g = 0; g < op.groups; g++) {
        const float* from = x + g * c.ic * area * L;
        for (long q = 0; q < blocks; q++)
            for (long z = 0; z < area; z++)
                for (long k = 0; k < c.ic; k += L) {
                    const float* r = from + q * in.c * area * L + k * area * L + z * L;
                    float* to = p->turned + (q * area + z) * L * pitch + k;
                    if (k + L <= c.ic) {
                        float part[L][L];
                        UNROLL for (int m = 0; m < L; m++) {
                            const vf v = ld(r + m * area * L);
                            UNROLL for (int b = 0; b < L; b++) part[b][m] = v[b];
                        }
                        UNROLL for (int b = 0; b < L; b++) memcpy(to + b * pitch, part[b], L * 4);
                    } else {
                        for (long m = 0; k + m < c.ic; m++)
                            for (long b = 0; b < L; b++) to[b * pitch + m] = r[m * area * L + b];
                    }
                }
        // Some rows at a time, so that they stay in the cache for all outputs.
        const long whole = c.oh * op.sy * w * L * 2 * L * 4, rows = std::max<long>(1, std::min(c.oh, c.oh * CACHE / whole));
        const long some = rows < c.oh ? 1 : std::max<long>(1, CACHE / whole);
        for (long q = 0; q < blocks; q += some)
            for (long y = 0; y < c.oh; y += rows) {
                a.blocks = std::min(some, blocks - q), a.rows = std::min(rows, c.oh - y);
                const float *d = delta + EDGE * L + q * a.d_block + y * a.d_row, *r = p->turned + q * a.i_block + y * a.i_row;
                for (long k = 0; k < c.ic; k += 2 * L)
                    for (long ky = 0; ky < op.kh; ky++)
                        for (long kx = 0; kx < op.kw; kx++) {
                            const long place = (in.pad - op.py + ky * op.dy) * w + in.pad - op.px + kx * op.dx;
                            for (long o = 0, t; o < c.oc; o += t) {
                                t = c.oc - o >= 6 ? 6 : tile(c.oc - o);
                                const long channel = g * c.oc + o;
                                auto f = t == 6 ? turned_tile<6> : t == 3 ? turned_tile<3> : t == 2 ? turned_tile<2> : turned_tile<1>;
                                f(d + channel * dcs, r + place * L * pitch + k, pitch, a,
                                  G + op.weight + channel * op.so + k * op.si + ky * op.sky + kx * op.skx, op.so, op.si, c.ic - k,
                                  add || q || y);
                            }
                        }
            }
    }
}

// The kernels' gradient from blocks q0 to q1: sums by lane, added to `sums`; or, of all blocks at once, to G.
FN void conv_weights(Program* p, int i, const float* x, const float* delta, long q0, long q1, float* G, bool add) {
    const Op& op = p->ops[i];
    const Conv& c = *p->conv[i];
    const Value &in = p->values[op.in], &out = p->values[op.out];
    const long irs = row_size(in, L), ics = channel_size(in, L), drs = (c.ow + 2 * EDGE) * L, dcs = c.oh * drs;
    const float* from = x + q0 * block_size(in, L) + (in.pad - op.py) * irs + (in.pad - op.px) * L;
    Area a{q1 - q0, c.oh, c.ow, out.c * dcs, dcs, drs, block_size(in, L), op.sy * irs, op.sx * L};
    if (c.together) {
        weights_turned(p, i, x, delta, G, add);
        return;
    }
    long tap[4];
    const long rows = std::max<long>(1, std::min<long>(8, 196608 / ((in.c + out.c) * c.ow * L * 4)));
    for (long q = q0; q < q1; q++)
        for (long y = 0; y < c.oh; y += rows) {
            a.blocks = 1, a.rows = std::min(rows, c.oh - y);
            const float *d = delta + (q - q0) * a.d_block + y * drs + EDGE * L, *r = from + (q - q0) * a.i_block + y * a.i_row;
            for (long g = 0; g < op.groups; g++)
                for (long o = 0, n; o < c.oc; o += n) {
                    n = tile(c.oc - o);
                    for (long t = 0, m; t < c.taps; t += m) {
                        m = std::min<long>(4, c.taps - t);
                        for (long j = 0; j < m; j++) tap[j] = c.tap[t + j].in;
                        into[n - 1][m - 1](d + (g * c.oc + o) * dcs, r + g * c.ic * ics, tap, a,
                                           p->sums + ((g * c.oc + o) * c.taps + t) * L, c.taps * L);
                    }
                }
        }
}

template <int O, int P>
FN void input_tile(const float* d, const long* at, const Tap* first, const Tap* last, const float* w, float* to, const long* places, long stride, bool again) {
    vf acc[O][P];
    UNROLL for (int o = 0; o < O; o++)
        UNROLL for (int p = 0; p < P; p++) acc[o][p] = again ? ld(to + o * stride + places[p]) : vf{};
    conv_tile<O, P>(d, at, first, last, w, acc);
    UNROLL for (int o = 0; o < O; o++)
        UNROLL for (int p = 0; p < P; p++) st(to + o * stride + places[p], acc[o][p]);
}

typedef void (*Input)(const float*, const long*, const Tap*, const Tap*, const float*, float*, const long*, long, bool);
const Input input[3][4] = {{input_tile<1, 1>, input_tile<1, 2>, input_tile<1, 3>, input_tile<1, 4>},
                           {input_tile<2, 1>, input_tile<2, 2>, input_tile<2, 3>, input_tile<2, 4>},
                           {input_tile<3, 1>, input_tile<3, 2>, input_tile<3, 3>, input_tile<3, 4>}};

// The input's gradient, of blocks q0 to q1, by kernels packed for going back.
FN void conv_input(const Program* p, int i, const float* delta, const float* packed, float* dx, long q0, long q1, bool again) {
    const Op& op = p->ops[i];
    const Conv& c = *p->conv[i];
    const Value &in = p->values[op.in], &out = p->values[op.out];
    const long dcs = c.oh * (c.ow + 2 * EDGE) * L, dbs = out.c * dcs, cs = in.h * in.w * L, bs = in.c * cs;
    const long taps = c.oc * op.kh * op.kw;
    // A tile is four neighbours of one block, or of several where rows are short.
    const long together = in.w / op.sx >= 12 ? 1 : q1 - q0;
    for (long g = 0; g < op.groups; g++)
        for (long first = 0; first < c.oc; first += CHANNELS)
            for (long q = q0; q < q1; q += together)
                for (long y = 0; y < in.h; y++)
                    for (long k = 0, t; k < c.ic; k += t) {
                        t = tile(c.ic - k);
                        const float *w = packed + (g * c.ic + k) * taps, *d = delta + (q - q0) * dbs + g * c.oc * dcs;
                        float* to = dx + q * bs + (g * c.ic + k) * cs;
                        for (const Cell* e = c.cells + c.row[y]; e != c.cells + c.row[y + 1]; e++) {
                            const Taps& list = c.lists[e->list];
                            const long places = e->n * together, each = list.count / c.oc;
                            const Tap* begin = list.first + first * each;
                            const Tap* stop = list.first + std::min<long>(c.oc, first + CHANNELS) * each;
                            for (long z = 0, n; z < places; z += n) {
                                n = std::min<long>(4, places - z);
                                long at[4], put_at[4];
                                for (long j = 0; j < n; j++) {
                                    const long block = (z + j) / e->n, x = (z + j) % e->n;
                                    at[j] = block * dbs + e->from + x * L, put_at[j] = block * bs + e->to + x * e->step;
                                }
                                input[t - 1][n - 1](d, at, begin, stop, w, to, put_at, cs, again || first);
                            }
                        }
                    }
}

FN void flush(Program* p, int i, float* G, bool add) {  // sums by lane, into G
    const Op& op = p->ops[i];
    const Conv& c = *p->conv[i];
    const long channels = p->values[op.out].c;
    for (long k = 0; k < channels; k++)
        for (long t = 0; t < c.taps; t++) {
            const float v = total(ld(p->sums + (k * c.taps + t) * L));
            float& to = place(op, G, k, t);
            to = add ? to + v : v;
        }
}

FN void put_sums(float* to, const float* sums, long n, bool add) {
    for (long k = 0; k < n; k++) {
        const float v = total(ld(sums + k * L));
        to[k] = add ? to[k] + v : v;
    }
}

template <bool ALONG>
FN void conv_backward(Program* p, int i, const float* W, const float* V, float* G, bool add) {
    const Op& op = p->ops[i];
    const Conv& c = *p->conv[i];
    const long blocks = blocks_of(p), step = c.together ? blocks : 1, channels = p->values[op.out].c;
    if (op.needs) {
        pack(op, c, W, true, p->packed);
        if (ALONG) pack(op, c, V, true, p->packed2);
    }
    memset(p->channel_sums, 0, 2 * channels * L * 4);
    if (!c.together) memset(p->sums, 0, channels * c.taps * L * 4);
    for (long q = 0; q < blocks; q += step) {
        conv_delta(p, i, p->g[op.out], p->delta, q, q + step, p->channel_sums);
        if (ALONG) conv_delta(p, i, p->rg[op.out], p->rdelta, q, q + step, p->channel_sums + channels * L);
        if (op.learns) {
            conv_weights(p, i, p->x[op.in], ALONG ? p->rdelta : p->delta, q, q + step, G, add);
            if (ALONG) conv_weights(p, i, p->rx[op.in], p->delta, q, q + step, G, true);
        }
        if (op.needs) {
            conv_input(p, i, p->delta, p->packed, p->g[op.in], q, q + step, op.again);
            if (ALONG) {
                conv_input(p, i, p->rdelta, p->packed, p->rg[op.in], q, q + step, op.again);
                conv_input(p, i, p->delta, p->packed2, p->rg[op.in], q, q + step, true);
            }
        }
    }
    if (!op.learns) return;
    if (!c.together) flush(p, i, G, add);
    if (op.bias >= 0) put_sums(G + op.bias, p->channel_sums + (ALONG ? channels * L : 0), channels, add);
}

// ---- linear layers: products of a matrix in the row with blocks of samples

// out[o][p] (+)= Σ_i w[o, i] x[i][p], for O outputs and P blocks.
template <int O, int P>
FN void mat_tile(const float* w, long wo, long wi, const float* x, long xi, long xp, long n, float* out, long oo, long op, bool more) {
    vf acc[O][P];
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int p = 0; p < P; p++) acc[o][p] = more ? ld(out + o * oo + p * op) : vf{};
    for (long i = 0; i < n; i++, w += wi, x += xi) {
        vf b[O];
        if (O <= 4) UNROLL for (int o = 0; o < O; o++) b[o] = all(w[o * wo]);
        if (O <= 4) {
            UNROLL for (int p = 0; p < P; p++) {
                const vf v = ld(x + p * xp);
                UNROLL for (int o = 0; o < O; o++) acc[o][p] += b[o] * v;
            }
        } else {
            vf v[P];
            UNROLL for (int p = 0; p < P; p++) v[p] = ld(x + p * xp);
            UNROLL for (int o = 0; o < O; o++) {
                const vf k = all(w[o * wo]);
                UNROLL for (int p = 0; p < P; p++) acc[o][p] += k * v[p];
            }
        }
    }
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int p = 0; p < P; p++) st(out + o * oo + p * op, acc[o][p]);
}

typedef void (*Mat)(const float*, long, long, const float*, long, long, long, float*, long, long, bool);
#define MATS(O) {mat_tile<O, 1>, mat_tile<O, 2>, mat_tile<O, 3>, mat_tile<O, 4>}
#if LANES == 16
const Mat mats[6][4] = {MATS(1), MATS(2), MATS(3), {}, {}, MATS(6)};
#else
const Mat mats[3][4] = {MATS(1), MATS(2), MATS(3)};
#endif
// As many outputs as registers hold; AVX-512 has twice as many, and takes half of that where fewer are left.
#if LANES == 16
const Mat wide[2][4] = {{mat_tile<16, 1>, mat_tile<12, 2>, mat_tile<8, 3>, mat_tile<6, 4>},
                        {mat_tile<12, 1>, mat_tile<6, 2>, mat_tile<4, 3>, mat_tile<3, 4>}};
const long wide_of[2][4] = {{16, 12, 8, 6}, {12, 6, 4, 3}};
#else
const Mat wide[1][4] = {{mat_tile<12, 1>, mat_tile<6, 2>, mat_tile<4, 3>, mat_tile<3, 4>}};
const long wide_of[1][4] = {{12, 6, 4, 3}};
#endif
const int WIDTHS = sizeof wide_of / sizeof *wide_of;

// out[block][o] (+)= Σ_i w[o, i] x[block][i], for m outputs of n inputs.
FN void mat(const float* w, long wo, long wi, const float* x, long n, float* out, long m, long blocks, bool more) {
    const long chunk = 256;  // of inputs, which stay in the cache for all outputs
    for (long q = 0, P; q < blocks; q += P) {
        const long left = blocks - q;
        P = left == 5 ? 3 : std::min<long>(4, left);
        for (long i = 0; i < n || i == 0; i += chunk)
            for (long o = 0, t; o < m; o += t) {
                int k = 0;
                while (k < WIDTHS && m - o < wide_of[k][P - 1]) k++;
                t = k < WIDTHS ? wide_of[k][P - 1] : std::min<long>(3, m - o);
                (k < WIDTHS ? wide[k][P - 1] : mats[t - 1][P - 1])(w + o * wo + i * wi, wo, wi, x + q * n * L + i * L, L, n * L,
                                                         std::min(chunk, n - i), out + q * m * L + o * L, L, m * L, more || i);
            }
    }
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ZIPPED 1
#endif
#endif
#ifdef ZIPPED
#if LANES == 4
INLINE vf zip(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
INLINE vf zip_high(vf a, vf b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#elif LANES == 16
INLINE vf zip(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
INLINE vf zip_high(vf a, vf b) { return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31); }
#endif
#endif

// L vectors of L: rows become columns.
INLINE void transpose(vf* v) {
#if defined(ZIPPED) && LANES == 8  // AVX2 is quick within halves of a vector, so they are exchanged last
    vf t[8];
    UNROLL for (int k = 0; k < 8; k += 2) {
        t[k] = __builtin_shufflevector(v[k], v[k + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        t[k + 1] = __builtin_shufflevector(v[k], v[k + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    UNROLL for (int k = 0; k < 8; k += 4)
        UNROLL for (int h = 0; h < 2; h++) {
            v[k + 2 * h] = __builtin_shufflevector(t[k + h], t[k + 2 + h], 0, 1, 8, 9, 4, 5, 12, 13);
            v[k + 2 * h + 1] = __builtin_shufflevector(t[k + h], t[k + 2 + h], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    UNROLL for (int k = 0; k < 4; k++) {
        const vf low = __builtin_shufflevector(v[k], v[k + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        v[k + 4] = __builtin_shufflevector(v[k], v[k + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        v[k] = low;
    }
#elif defined(ZIPPED)
    UNROLL for (int stage = 1; stage < L; stage *= 2) {
        vf t[L];
        UNROLL for (int k = 0; k < L / 2; k++) t[2 * k] = zip(v[k], v[k + L / 2]), t[2 * k + 1] = zip_high(v[k], v[k + L / 2]);
        UNROLL for (int k = 0; k < L; k++) v[k] = t[k];
    }
#else
    float part[L][L];
    UNROLL for (int k = 0; k < L; k++) UNROLL for (int b = 0; b < L; b++) part[b][k] = v[k][b];
    UNROLL for (int k = 0; k < L; k++) memcpy(&v[k], part[k], L * 4);
#endif
}

// Samples as rows: [sample][input], so that products over samples can use the vectors.
FN void turn(const float* x, long n, long blocks, float* to) {
    const long pitch = padded(n);
    for (long q = 0; q < blocks; q++)
        for (long i = 0; i < n; i += L) {
            const long m = std::min(L, n - i);
            if (m == L) {
                vf v[L];
                UNROLL for (int k = 0; k < L; k++) v[k] = ld(x + (q * n + i + k) * L);
                transpose(v);
                UNROLL for (int b = 0; b < L; b++) memcpy(to + (q * L + b) * pitch + i, &v[b], L * 4);
            } else {
                for (long k = 0; k < m; k++)
                    for (int b = 0; b < L; b++) to[(q * L + b) * pitch + i + k] = x[(q * n + i + k) * L + b];
            }
        }
}

// The other way round: n values of L samples.
FN void turn_back(const float* rows, long pitch, long n, float* to) {
    for (long i = 0; i < n; i += L) {
        const long m = std::min(L, n - i);
        if (m == L) {
            vf v[L];
            UNROLL for (int b = 0; b < L; b++) memcpy(&v[b], rows + b * pitch + i, L * 4);
            transpose(v);
            UNROLL for (int k = 0; k < L; k++) st(to + (i + k) * L, v[k]);
        } else {
            for (long k = 0; k < m; k++)
                for (int b = 0; b < L; b++) to[(i + k) * L + b] = rows[b * pitch + i + k];
        }
    }
}

template <class T> INLINE T each(float f);
template <> INLINE vf each<vf>(float f) { return all(f); }
template <> INLINE float each<float>(float f) { return f; }

// Where SGD takes a weight (or a vector of them).
template <class T, bool MOMENTUM>
INLINE T sgd(T w, T g, T& velocity, const Rates& r) {
    g = w * each<T>(r.decay) + g;
    if (MOMENTUM) g = velocity = velocity * each<T>(r.momentum) + g;
    return w - each<T>(r.lr) * g;
}

enum Way { PUT, MORE, MOVE, MOVE_ON };  // a gradient is put down, added to one, or moves weights, without or with momentum

template <class T, int WAY>
INLINE void settle(T v, float* to, float* velocity, const Rates& r) {
    T was{}, past{};
    if (WAY != PUT) memcpy(&was, to, sizeof(T));
    if (WAY == MOVE_ON) memcpy(&past, velocity, sizeof(T));
    if (WAY == MORE) v = was + v;
    if (WAY == MOVE || WAY == MOVE_ON) v = sgd<T, WAY == MOVE_ON>(was, v, past, r);
    memcpy(to, &v, sizeof(T));
    if (WAY == MOVE_ON) memcpy(velocity, &past, sizeof(T));
}

template <int O, int WAY>
FN void outer_tile(const float* d, long m, const float* turned, long pitch, long blocks, float* g, float* velocity, long stride, long valid,
                   const Rates& r) {
    vf acc[O][4];
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int p = 0; p < 4; p++) acc[o][p] = vf{};
    for (long q = 0; q < blocks; q++, d += m * L)
        UNROLL for (long b = 0; b < L; b++, turned += pitch) {
            vf k[O];
            UNROLL for (int o = 0; o < O; o++) k[o] = all(d[o * L + b]);
            UNROLL for (int p = 0; p < 4; p++) {
                const vf v = ld(turned + p * L);
                UNROLL for (int o = 0; o < O; o++) acc[o][p] += k[o] * v;
            }
        }
    if (valid >= 4 * L) {
        UNROLL for (int o = 0; o < O; o++)
            UNROLL for (int p = 0; p < 4; p++) settle<vf, WAY>(acc[o][p], g + o * stride + p * L, velocity + o * stride + p * L, r);
        return;
    }
    float sums[O][4 * L];  // not `acc` itself, which would then have to be in memory all the time
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int p = 0; p < 4; p++) memcpy(sums[o] + p * L, &acc[o][p], L * 4);
    for (int o = 0; o < O; o++)
        for (long j = 0; j < valid; j++) settle<float, WAY>(sums[o][j], g + o * stride + j, velocity + o * stride + j, r);
}

// g[o, i] (+)= Σ over samples d[o] x[i]; or these are weights, which move.
template <int WAY>
FN void outer_by(const float* d, long m, const float* turned, long n, long blocks, float* g, float* velocity, const Rates& r) {
    const long pitch = padded(n);
    for (long i = 0; i < n; i += 4 * L)
        for (long o = 0, t; o < m; o += t) {
            t = tall(m - o);
            const long at = o * n + i;
            (t == TALL ? outer_tile<TALL, WAY> : t == 3 ? outer_tile<3, WAY> : t == 2 ? outer_tile<2, WAY> : outer_tile<1, WAY>)(
                d + o * L, m, turned + i, pitch, blocks, g + at, WAY == MOVE_ON ? velocity + at : g, n, n - i, r);
        }
}

FN void outer(const float* d, long m, const float* turned, long n, long blocks, float* g, bool add) {
    (add ? outer_by<MORE> : outer_by<PUT>)(d, m, turned, n, blocks, g, nullptr, Rates{});
}

template <bool ALONG>
FN void linear_forward(Program* p, int i, const float* W, const float* V) {
    const Op& op = p->ops[i];
    const Value& in = p->values[op.in];
    const long n = in.c * in.h * in.w, m = p->values[op.out].c, blocks = blocks_of(p);
    float* out = (ALONG ? p->rx : p->x)[op.out];
    mat(W + op.weight, n, 1, (ALONG ? p->rx : p->x)[op.in], n, out, m, blocks, false);
    if (ALONG) mat(V + op.weight, n, 1, p->x[op.in], n, out, m, blocks, true);
    const float* bias = op.bias < 0 ? nullptr : (ALONG ? V : W) + op.bias;
    const vf scale = all(op.scale);
    const float* made = p->x[op.out];
    for (long q = 0; q < blocks; q++)
        for (long o = 0; o < m; o++, out += L, made += L) {
            vf v = (ld(out) + all(bias ? bias[o] : 0.f)) * scale;
            if (op.relu) v = ALONG ? (ld(made) > vf{} ? v : vf{}) : relu(v);
            st(out, v);
        }
}

template <bool ALONG>
FN void linear_backward(Program* p, int i, float* W, const float* V, float* G, bool add) {
    const Op& op = p->ops[i];
    const Value& in = p->values[op.in];
    const long n = in.c * in.h * in.w, m = p->values[op.out].c, blocks = blocks_of(p);
    float *d = p->g[op.out], *rd = ALONG ? p->rg[op.out] : nullptr;
    if (op.scale != 1)
        for (long k = 0; k < blocks * m * L; k += L) {
            st(d + k, ld(d + k) * (float)op.scale);
            if (ALONG) st(rd + k, ld(rd + k) * (float)op.scale);
        }
    if (op.needs) {
        mat(W + op.weight, 1, n, d, m, p->g[op.in], n, blocks, op.again);
        if (ALONG) {
            mat(W + op.weight, 1, n, rd, m, p->rg[op.in], n, blocks, op.again);
            mat(V + op.weight, 1, n, d, m, p->rg[op.in], n, blocks, true);
        }
    }
    if (!op.learns) return;
    const bool there = p->rows && !root(p, op.in);
    if (!there) turn(p->x[op.in], n, blocks, p->turned);
    const float* turned = there ? p->rows : p->turned;
    if (!ALONG && p->at_once && (*p->alone)[i]) {
        float* velocity = p->at_once->first;
        if (velocity) outer_by<MOVE_ON>(d, m, turned, n, blocks, W + op.weight, velocity + op.weight, p->rates);
        else outer_by<MOVE>(d, m, turned, n, blocks, W + op.weight, nullptr, p->rates);
    } else {
        outer(ALONG ? rd : d, m, turned, n, blocks, G + op.weight, add);
    }
    if (ALONG) {
        turn(p->rx[op.in], n, blocks, p->turned);
        outer(d, m, p->turned, n, blocks, G + op.weight, true);
    }
    if (op.bias >= 0)
        for (long o = 0; o < m; o++) {
            vf s = {};
            for (long q = 0; q < blocks; q++) s += ld((ALONG ? rd : d) + (q * m + o) * L);
            float& to = G[op.bias + o];
            to = add ? to + total(s) : total(s);
        }
}

// ---- 3x3 convolutions with fewer products: tiles of inputs and kernels are transformed, multiplied point by point, and summed
// over channels, which is a product of matrices for every point; then transformed to outputs. Going back it is the same with
// everything transposed.

struct Plane { const float* x; long block, channel, row, h, w; };  // a map without its border, and what lies where

// y = m x m', of a matrix that is known when this is compiled: its zeros and ones cost nothing. TURNED: m' x m.
template <bool TURNED, int R, int C>
INLINE void both_ways(const float (&m)[R][C], const vf* x, vf* y) {
    constexpr int FROM = TURNED ? R : C, TO = TURNED ? C : R;
    vf half[TO * FROM];
    UNROLL for (int c = 0; c < FROM; c++)
        UNROLL for (int r = 0; r < TO; r++) {
            vf s = {};
            bool begun = false;
            UNROLL for (int k = 0; k < FROM; k++) {
                const float f = TURNED ? m[k][r] : m[r][k];
                if (f == 0) continue;
                s = begun ? s + x[k * FROM + c] * f : x[k * FROM + c] * f;
                begun = true;
            }
            half[r * FROM + c] = s;
        }
    UNROLL for (int r = 0; r < TO; r++)
        UNROLL for (int c = 0; c < TO; c++) {
            vf s = {};
            bool begun = false;
            UNROLL for (int k = 0; k < FROM; k++) {
                const float f = TURNED ? m[k][c] : m[c][k];
                if (f == 0) continue;
                s = begun ? s + half[r * FROM + k] * f : half[r * FROM + k] * f;
                begun = true;
            }
            y[r * TO + c] = s;
        }
}

// A square of a map from row y, column x on; zeros around the map.
template <int N>
INLINE void patch(const Plane& s, const float* from, long y, long x, vf* to) {
    if (y >= 0 && x >= 0 && y + N <= s.h && x + N <= s.w) {
        UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < N; c++) to[r * N + c] = ld(from + (y + r) * s.row + (x + c) * L);
        return;
    }
    for (int r = 0; r < N; r++)
        for (int c = 0; c < N; c++) {
            const bool there = y + r >= 0 && y + r < s.h && x + c >= 0 && x + c < s.w;
            to[r * N + c] = there ? ld(from + (y + r) * s.row + (x + c) * L) : vf{};
        }
}

// Inputs of tiles `first` to `last`: [point][four tiles][channel][tile][L].
template <int M>
FN void few_inputs(const Tiles& t, const Plane& s, long pad, long first, long last, long channels, float* to) {
    constexpr int N = Few<M>::N;
    for (long u = first; u < last; u++) {
        const long q = u / t.each, r = u % t.each, k = u - first, y = r / t.across * M - pad, x = r % t.across * M - pad;
        const float* from = s.x + q * s.block;
        float* put = to + (k / SIDE_BY_SIDE * channels * SIDE_BY_SIDE + k % SIDE_BY_SIDE) * L;
        for (long i = 0; i < channels; i++, from += s.channel, put += SIDE_BY_SIDE * L) {
            vf d[N * N], v[N * N];
            patch<N>(s, from, y, x, d);
            both_ways<false>(Few<M>::IN, d, v);
            UNROLL for (int z = 0; z < N * N; z++) st(put + z * t.inputs, v[z]);
        }
    }
}

// The same with channels as lanes: [point][tile][sample][channel].
template <int M>
FN void few_turned(const Tiles& t, const Plane& s, long pad, long first, long last, long channels, float* to) {
    constexpr int N = Few<M>::N;
    const long pitch = padded(channels);
    for (long u = first; u < last; u++) {
        const long q = u / t.each, r = u % t.each, y = r / t.across * M - pad, x = r % t.across * M - pad;
        for (long i = 0; i < channels; i += L) {
            vf v[L][N * N];
            const long some = std::min(L, channels - i);
            for (long j = 0; j < L; j++) {
                vf d[N * N];
                patch<N>(s, s.x + q * s.block + (i + std::min(j, some - 1)) * s.channel, y, x, d);
                both_ways<false>(Few<M>::IN, d, v[j]);
            }
            float* put = to + (u - first) * L * pitch + i;
            for (int z = 0; z < N * N; z++) {
                vf lanes[L];
                UNROLL for (int j = 0; j < L; j++) lanes[j] = v[j][z];
                transpose(lanes);
                UNROLL for (int j = 0; j < L; j++) st(put + z * t.turned + j * pitch, lanes[j]);
            }
        }
    }
}

// Kernels from outputs o0 to o1 and inputs i0 to i1: [point][output][input], rows `pitch` apart. `flip`: as going back reads them.
template <int M>
FN void few_kernels(const Op& op, const Tiles& t, const float* W, long o0, long o1, long i0, long i1, bool flip, long pitch, float* to) {
    constexpr int N = Few<M>::N;
    for (long o = o0; o < o1; o++)
        for (long i = i0; i < i1; i += L) {
            const float* w = W + op.weight + o * op.so + i * op.si;
            const long some = std::min(L, i1 - i);
            vf d[9], v[N * N];
            for (int k = 0; k < 9; k++) {
                const float* from = w + k / 3 * op.sky + k % 3 * op.skx;
                vf& one = d[flip ? 8 - k : k];
                one = vf{};
                if (some == L && op.si == 1) memcpy(&one, from, L * 4);
                else for (long l = 0; l < some; l++) one[l] = from[l * op.si];
            }
            both_ways<false>(Few<M>::TAPS, d, v);
            float* put = to + (o - o0) * pitch + i - i0;
            UNROLL for (int z = 0; z < N * N; z++) st(put + z * t.kernels, v[z]);
        }
}

// Products of `count` tiles, from the `at`th of those transformed on: [point][output][tile][L].
FN void few_products(const Tiles& t, const float* kernels, long wo, long wi, const float* inputs, long channels, long at, long count,
                     long outputs, float* to) {
    for (long z = 0; z < t.points; z++, kernels += t.kernels, inputs += t.inputs, to += t.products)
        for (long o = 0, n; o < outputs; o += n) {
            n = tall(outputs - o);
            for (long k = 0; k < count; k += SIDE_BY_SIDE)
                mats[n - 1][std::min(SIDE_BY_SIDE, count - k) - 1](
                    kernels + o * wo, wo, wi, inputs + (at + k) * channels * L, SIDE_BY_SIDE * L, L, channels,
                    to + (o * t.some + k) * L, t.some * L, L, false);
        }
}

// Outputs of tiles from their products, each handed to `put(output, block, row, column, M*M values)`.
template <int M, class Put>
INLINE void few_outputs(const Tiles& t, const float* products, long first, long count, long outputs, Put put) {
    constexpr int N = Few<M>::N;
    for (long o = 0; o < outputs; o++)
        for (long k = 0; k < count; k++) {
            vf v[N * N], y[M * M];
            UNROLL for (int z = 0; z < N * N; z++) v[z] = ld(products + z * t.products + (o * t.some + k) * L);
            both_ways<false>(Few<M>::OUT, v, y);
            const long u = first + k, r = u % t.each;
            put(o, u / t.each, r / t.across * M, r % t.across * M, y);
        }
}

template <int M>
FN void few_forward(Program* p, int i, const float* W) {
    const Op& op = p->ops[i];
    const Conv& c = *p->conv[i];
    const Tiles& t = c.forth;
    const Value &in = p->values[op.in], &out = p->values[op.out];
    const long rs = row_size(in, L), ors = row_size(out, L), ocs = channel_size(out, L), obs = block_size(out, L);
    const long tiles = blocks_of(p) * t.each, pitch = up_to(c.ic, L);
    const Plane s{p->x[op.in] + in.pad * (rs + L), block_size(in, L), channel_size(in, L), rs, in.h, in.w};
    float* to = p->x[op.out] + out.pad * (ors + L);
    const vf scale = all(op.scale);
    for (long first = 0; first < tiles; first += t.at_once) {
        const long last = std::min(tiles, first + t.at_once);
        few_inputs<M>(t, s, op.py, first, last, c.ic, p->few_inputs);
        for (long o = 0; o < c.oc; o += t.outputs) {
            const long some = std::min(t.outputs, c.oc - o);
            few_kernels<M>(op, t, W, o, o + some, 0, c.ic, false, pitch, p->few_kernels);
            for (long u = first; u < last; u += t.some) {
                const long count = std::min(t.some, last - u);
                few_products(t, p->few_kernels, pitch, 1, p->few_inputs, c.ic, u - first, count, some, p->few_products);
                few_outputs<M>(t, p->few_products, u, count, some, [&](long k, long q, long y, long x, const vf* v) TARGET {
                    const vf bias = all(op.bias < 0 ? 0.f : W[op.bias + o + k]);
                    float* put = to + q * obs + (o + k) * ocs;
                    if (op.pool) {  // M is even
                        for (long r = 0; r + 1 < M && (y + r) / 2 < c.rows; r += 2)
                            for (long z = 0; z + 1 < M && (x + z) / 2 < c.cols; z += 2) {
                                const vf* at = v + r * M + z;
                                const vf four[4] = {(at[0] + bias) * scale, (at[1] + bias) * scale, (at[M] + bias) * scale,
                                                    (at[M + 1] + bias) * scale};
                                vi which;
                                st(put + (y + r) / 2 * ors + (x + z) / 2 * L, largest(four, op.relu, which));
                                const long unit = (y + r) / 2 * c.cols + (x + z) / 2;
                                *(vi*)(p->arg[i] + ((q * out.c + o + k) * c.units + unit) * L) = which;
                            }
                        return;
                    }
                    for (long r = 0; r < M && y + r < c.oh; r++)
                        for (long z = 0; z < M && x + z < c.ow; z++) {
                            const vf made = (v[r * M + z] + bias) * scale;
                            st(put + (y + r) * ors + (x + z) * L, op.relu ? relu(made) : made);
                        }
                });
            }
        }
    }
}

// The input's gradient, from `delta` of all blocks.
template <int M>
FN void few_back(Program* p, int i, const float* W) {
    const Op& op = p->ops[i];
    const Conv& c = *p->conv[i];
    const Tiles& t = c.back;
    const Value& in = p->values[op.in];
    const long drs = (c.ow + 2 * EDGE) * L, dcs = c.oh * drs, cs = in.h * in.w * L;
    const long tiles = blocks_of(p) * t.each;
    const Plane s{p->delta + EDGE * L, c.oc * dcs, dcs, drs, c.oh, c.ow};
    for (long first = 0; first < tiles; first += t.at_once) {
        const long last = std::min(tiles, first + t.at_once);
        few_inputs<M>(t, s, 2 - op.py, first, last, c.oc, p->few_inputs);
        for (long o = 0; o < c.ic; o += t.outputs) {
            const long some = std::min(t.outputs, c.ic - o);
            few_kernels<M>(op, t, W, 0, c.oc, o, o + some, true, t.outputs, p->few_kernels);
            for (long u = first; u < last; u += t.some) {
                const long count = std::min(t.some, last - u);
                few_products(t, p->few_kernels, 1, t.outputs, p->few_inputs, c.oc, u - first, count, some, p->few_products);
                few_outputs<M>(t, p->few_products, u, count, some, [&](long k, long q, long y, long x, const vf* v) TARGET {
                    float* put = p->g[op.in] + (q * in.c + o + k) * cs;
                    for (long r = 0; r < M && y + r < in.h; r++)
                        for (long z = 0; z < M && x + z < in.w; z++) {
                            float* at = put + ((y + r) * in.w + x + z) * L;
                            st(at, op.again ? ld(at) + v[r * M + z] : v[r * M + z]);
                        }
                });
            }
        }
    }
}

// The kernels' gradient, from `delta` of all blocks.
template <int M>
FN void few_weights(Program* p, int i, float* G, bool add) {
    constexpr int N = Few<M>::N;
    const Op& op = p->ops[i];
    const Conv& c = *p->conv[i];
    const Tiles& t = c.forth;
    const Value& in = p->values[op.in];
    const long rs = row_size(in, L), drs = (c.ow + 2 * EDGE) * L, dcs = c.oh * drs, tiles = blocks_of(p) * t.each;
    const Plane s{p->x[op.in] + in.pad * (rs + L), block_size(in, L), channel_size(in, L), rs, in.h, in.w};
    const Plane d{p->delta + EDGE * L, c.oc * dcs, dcs, drs, c.oh, c.ow};
    for (long first = 0; first < tiles; first += t.at_once, add = true) {
        const long last = std::min(tiles, first + t.at_once);
        few_turned<M>(t, s, op.py, first, last, c.ic, p->few_inputs);
        for (long o = 0; o < c.oc; o += t.outputs) {
            const long some = std::min(t.outputs, c.oc - o);
            for (long u = first; u < last; u++) {
                const long q = u / t.each, r = u % t.each;
                for (long k = 0; k < some; k++) {
                    vf part[M * M], v[N * N];
                    patch<M>(d, d.x + q * d.block + (o + k) * d.channel, r / t.across * M, r % t.across * M, part);
                    both_ways<true>(Few<M>::OUT, part, v);
                    float* put = p->few_products + ((u - first) * some + k) * L;
                    UNROLL for (int z = 0; z < N * N; z++) st(put + z * t.products, v[z]);
                }
            }
            for (long z = 0; z < t.points; z++)
                outer(p->few_products + z * t.products, some, p->few_inputs + z * t.turned, c.ic, last - first,
                      p->few_kernels + z * t.kernels, false);
            for (long k = 0; k < some; k++)
                for (long j = 0; j < c.ic; j += L) {
                    vf v[N * N], taps[9];
                    UNROLL for (int z = 0; z < N * N; z++) memcpy(&v[z], p->few_kernels + z * t.kernels + k * c.ic + j, L * 4);
                    both_ways<true>(Few<M>::TAPS, v, taps);
                    float* to = G + op.weight + (o + k) * op.so + j * op.si;
                    const long wide = std::min(L, c.ic - j);
                    for (int z = 0; z < 9; z++) {
                        float* at = to + z / 3 * op.sky + z % 3 * op.skx;
                        for (long l = 0; l < wide; l++) at[l * op.si] = (add ? at[l * op.si] : 0.f) + taps[z][l];
                    }
                }
        }
    }
}

FN void forward_conv(Program* p, int i, const float* W) {
    const long m = p->ops[i].tile;
    if (m == 4) few_forward<4>(p, i, W);
    else if (m == 3) few_forward<3>(p, i, W);
    else conv_forward<false>(p, i, W, nullptr);
}

FN void backward_conv(Program* p, int i, const float* W, float* G, bool add) {
    const Op& op = p->ops[i];
    if (!op.tile) {
        conv_backward<false>(p, i, W, nullptr, G, add);
        return;
    }
    const long channels = p->values[op.out].c;
    memset(p->channel_sums, 0, channels * L * 4);
    conv_delta(p, i, p->g[op.out], p->delta, 0, blocks_of(p), p->channel_sums);
    if (op.learns) (op.tile == 4 ? few_weights<4> : few_weights<3>)(p, i, G, add);
    if (op.needs) (op.tile == 4 ? few_back<4> : few_back<3>)(p, i, W);
    if (op.learns && op.bias >= 0) put_sums(G + op.bias, p->channel_sums, channels, add);
}

// ---- everything else goes row by row

struct Rows {  // where the rows of a value are: of its data (with a border) or its gradient (without)
    long block, channel, row, start;
};
FN Rows data_rows(const Value& v) {
    return {block_size(v, L), channel_size(v, L), row_size(v, L), v.pad * row_size(v, L) + v.pad * L};
}
FN Rows grad_rows(const Value& v) { return {plain_size(v, L), v.h * v.w * L, v.w * L, 0}; }
INLINE long at(const Rows& r, long q, long c, long y) { return q * r.block + c * r.channel + y * r.row + r.start; }

#define EACH(v) \
    for (long q = 0; q < blocks; q++) \
        for (long c = 0; c < (v).c; c++) \
            for (long y = 0; y < (v).h; y++)
#define ALONG_ROW(v) for (long x = 0; x < (v).w * L; x += L)

// Where the ReLU behind an operation cut off, nothing goes back.
FN void cut_off(const Program* p, const Op& op, float* g) {
    const Value& v = p->values[op.out];
    const Rows o = data_rows(v), r = grad_rows(v);
    const long blocks = blocks_of(p);
    EACH(v) {
        const float* made = p->x[op.out] + at(o, q, c, y);
        float* d = g + at(r, q, c, y);
        ALONG_ROW(v) st(d + x, ld(made + x) > vf{} ? ld(d + x) : vf{});
    }
}

// ---- norms: over the batch (a channel each), or over groups of channels of each sample

INLINE float* stat(float* all_, const Op& op, long q, long c, long per) {
    return all_ + (op.batch ? c : q * op.groups + c / per) * 4 * L;
}

// Means over what is normalised together: `per` channels at a time, then written to two slots of its statistics.
FN void spread(const Program* p, const Op& op, const Value& v, float* stats, int slot, const vf* a, const vf* b) {
    const long blocks = blocks_of(p), per = op.batch ? 1 : v.c / op.groups;
    const float count = op.batch ? (float)(p->n * v.h * v.w) : (float)(per * v.h * v.w);
    const long sets = op.batch ? v.c : op.groups * blocks;
    for (long k = 0; k < sets; k++) {
        vf s = a[k], t = b[k];
        if (op.batch) s = all(total(s)), t = all(total(t));
        st(stats + k * 4 * L + slot * L, s / all(count));
        st(stats + k * 4 * L + (slot + 1) * L, t / all(count));
    }
}

FN void norm_forward(Program* p, int i, float* W, int update) {
    const Op& op = p->ops[i];
    const Value& v = p->values[op.out];
    const Rows r = data_rows(p->values[op.in]), o = data_rows(v);
    const long blocks = blocks_of(p), per = op.batch ? 1 : v.c / op.groups, sets = op.batch ? v.c : op.groups * blocks;
    const float* in = p->x[op.in];
    float* s = p->stat[i];
    vf *a = (vf*)p->set_sums, *b = a + sets;
    if (op.batch == 2) {
        for (long c = 0; c < v.c; c++) {
            st(s + c * 4 * L, all(W[op.mean + c]));
            st(s + c * 4 * L + L, all(1.f / std::sqrt(W[op.var + c] + (float)op.eps)));
        }
    } else {
        for (long k = 0; k < sets; k++) a[k] = b[k] = vf{};
        EACH(v) {
            const float* z = in + at(r, q, c, y);
            const vf here = op.batch ? present(p, q) : all(1.f);
            vf sum = {};
            ALONG_ROW(v) sum += ld(z + x);
            a[op.batch ? c : q * op.groups + c / per] += (here > vf{} ? sum : vf{});
        }
        spread(p, op, v, s, 0, a, b);
        EACH(v) {
            const float* z = in + at(r, q, c, y);
            const vf mean = ld(stat(s, op, q, c, per)), here = op.batch ? present(p, q) : all(1.f);
            vf sum = {};
            ALONG_ROW(v) { const vf d = ld(z + x) - mean; sum += d * d; }
            b[op.batch ? c : q * op.groups + c / per] += (here > vf{} ? sum : vf{});
        }
        for (long k = 0; k < sets; k++) a[k] = b[k];
        spread(p, op, v, s, 2, a, b);  // the variance, in both slots
        for (long k = 0; k < sets; k++) {
            const vf var = ld(s + k * 4 * L + 2 * L);
            if (update && op.batch && op.mean >= 0) {
                const float m = op.momentum, count = (float)(p->n * v.h * v.w);
                W[op.mean + k] = (1 - m) * W[op.mean + k] + m * s[k * 4 * L];
                W[op.var + k] = (1 - m) * W[op.var + k] + m * var[0] * (count / (count - 1));
            }
            vf root;
            for (int l = 0; l < L; l++) root[l] = 1.f / std::sqrt(var[l] + (float)op.eps);
            st(s + k * 4 * L + L, root);
        }
    }
    EACH(v) {
        const float* z = in + at(r, q, c, y);
        const float* k = stat(s, op, q, c, per);
        float* to = p->x[op.out] + at(o, q, c, y);
        const vf mean = ld(k), root = ld(k + L), gamma = all(op.weight < 0 ? 1.f : W[op.weight + c]);
        const vf beta = all(op.bias < 0 ? 0.f : W[op.bias + c]), slope = gamma * root;
        ALONG_ROW(v) {
            const vf w = (ld(z + x) - mean) * slope + beta;
            st(to + x, op.relu ? relu(w) : w);
        }
    }
}

// Derivatives along a direction: those of mean and 1/std (in rstat: mean, and that of 1/std over 1/std), then of outputs.
FN void norm_along(Program* p, int i, const float* W, const float* V) {
    const Op& op = p->ops[i];
    const Value& v = p->values[op.out];
    const Rows r = data_rows(p->values[op.in]), o = data_rows(v);
    const long blocks = blocks_of(p), per = op.batch ? 1 : v.c / op.groups, sets = op.batch ? v.c : op.groups * blocks;
    const float *in = p->x[op.in], *rin = p->rx[op.in];
    float *s = p->stat[i], *rs = p->rstat[i];
    vf *a = (vf*)p->set_sums, *b = a + sets;
    for (long k = 0; k < sets; k++) a[k] = b[k] = vf{};
    if (op.batch != 2)
        EACH(v) {
            const float *z = in + at(r, q, c, y), *rz = rin + at(r, q, c, y), *k = stat(s, op, q, c, per);
            const vf mean = ld(k), root = ld(k + L), here = op.batch ? present(p, q) : all(1.f);
            vf f = {}, g = {};
            ALONG_ROW(v) { const vf d = ld(rz + x); f += d; g += d * (ld(z + x) - mean) * root; }
            const long set = op.batch ? c : q * op.groups + c / per;
            a[set] += (here > vf{} ? f : vf{}), b[set] += (here > vf{} ? g : vf{});
        }
    spread(p, op, v, rs, 0, a, b);
    for (long k = 0; k < sets; k++) st(rs + k * 4 * L + L, -ld(rs + k * 4 * L + L) * ld(s + k * 4 * L + L));
    EACH(v) {
        const float *z = in + at(r, q, c, y), *rz = rin + at(r, q, c, y), *k = stat(s, op, q, c, per), *rk = stat(rs, op, q, c, per);
        const float* made = p->x[op.out] + at(o, q, c, y);
        float* to = p->rx[op.out] + at(o, q, c, y);
        const vf mean = ld(k), root = ld(k + L), gamma = all(op.weight < 0 ? 1.f : W[op.weight + c]);
        const vf rgamma = all(op.weight < 0 ? 0.f : V[op.weight + c]), rbeta = all(op.bias < 0 ? 0.f : V[op.bias + c]);
        ALONG_ROW(v) {
            const vf hat = (ld(z + x) - mean) * root, rhat = root * (ld(rz + x) - ld(rk)) + hat * ld(rk + L);
            const vf w = rgamma * hat + gamma * rhat + rbeta;
            st(to + x, op.relu ? (ld(made + x) > vf{} ? w : vf{}) : w);
        }
    }
}

template <bool ALONG>
FN void norm_backward(Program* p, int i, const float* W, const float* V, float* G, bool add) {
    const Op& op = p->ops[i];
    const Value& v = p->values[op.out];
    const Rows r = data_rows(p->values[op.in]), d = grad_rows(v);
    const long blocks = blocks_of(p), per = op.batch ? 1 : v.c / op.groups, sets = op.batch ? v.c : op.groups * blocks;
    const float *in = p->x[op.in], *rin = ALONG ? p->rx[op.in] : nullptr;
    float *g = p->g[op.out], *rg = ALONG ? p->rg[op.out] : nullptr, *s = p->stat[i], *rs = p->rstat[i];
    vf *a = (vf*)p->set_sums, *b = a + sets, *ra = b + sets, *rb = ra + sets, *dg = rb + sets, *db = dg + v.c;
    for (long k = 0; k < 4 * sets + 2 * v.c; k++) a[k] = vf{};
    EACH(v) {
        const float *z = in + at(r, q, c, y), *k = stat(s, op, q, c, per), *e = g + at(d, q, c, y);
        const float *rz = ALONG ? rin + at(r, q, c, y) : nullptr, *re = ALONG ? rg + at(d, q, c, y) : nullptr;
        const float* rk = ALONG ? stat(rs, op, q, c, per) : nullptr;
        const vf mean = ld(k), root = ld(k + L), gamma = all(op.weight < 0 ? 1.f : W[op.weight + c]);
        const vf rgamma = all(ALONG && op.weight >= 0 ? V[op.weight + c] : 0.f);
        vf f = {}, h = {}, rf = {}, rh = {}, wg = {}, wb = {};
        ALONG_ROW(v) {
            const vf hat = (ld(z + x) - mean) * root, dy = ld(e + x);
            f += dy, h += dy * hat;
            if (ALONG) {
                const vf rdy = ld(re + x), rhat = root * (ld(rz + x) - ld(rk)) + hat * ld(rk + L);
                rf += rgamma * dy + gamma * rdy;
                rh += (rgamma * dy + gamma * rdy) * hat + gamma * dy * rhat;
                wb += rdy, wg += rdy * hat + dy * rhat;
            }
        }
        const long set = op.batch ? c : q * op.groups + c / per;
        a[set] += gamma * f, b[set] += gamma * h;
        if (ALONG) ra[set] += rf, rb[set] += rh, dg[c] += wg, db[c] += wb;
        else dg[c] += h, db[c] += f;
    }
    if (op.learns) {
        if (op.weight >= 0) put_sums(G + op.weight, (float*)dg, v.c, add);
        if (op.bias >= 0) put_sums(G + op.bias, (float*)db, v.c, add);
    }
    if (!op.needs) return;
    if (op.batch == 2)
        for (long k = 0; k < 4 * sets; k++) a[k] = vf{};
    spread(p, op, v, s, 2, a, b);
    if (ALONG) spread(p, op, v, rs, 2, ra, rb);
    EACH(v) {
        const float *z = in + at(r, q, c, y), *k = stat(s, op, q, c, per), *e = g + at(d, q, c, y);
        const float *rz = ALONG ? rin + at(r, q, c, y) : nullptr, *re = ALONG ? rg + at(d, q, c, y) : nullptr;
        const float* rk = ALONG ? stat(rs, op, q, c, per) : nullptr;
        float *to = p->g[op.in] + at(d, q, c, y), *rto = ALONG ? p->rg[op.in] + at(d, q, c, y) : nullptr;
        const vf mean = ld(k), root = ld(k + L), m1 = ld(k + 2 * L), m2 = ld(k + 3 * L);
        const vf gamma = all(op.weight < 0 ? 1.f : W[op.weight + c]), here = present(p, q);
        const vf rgamma = all(ALONG && op.weight >= 0 ? V[op.weight + c] : 0.f);
        ALONG_ROW(v) {
            const vf hat = (ld(z + x) - mean) * root, dy = ld(e + x);
            vf w = root * (gamma * dy - m1 - hat * m2);
            w = here > vf{} ? w : vf{};
            if (ALONG) {
                const vf rhat = root * (ld(rz + x) - ld(rk)) + hat * ld(rk + L), rh = rgamma * dy + gamma * ld(re + x);
                vf u = ld(rk + L) * w + root * (rh - ld(rk + 2 * L) - rhat * m2 - hat * ld(rk + 3 * L));
                u = here > vf{} ? u : vf{};
                st(rto + x, op.again ? ld(rto + x) + u : u);
            }
            st(to + x, op.again ? ld(to + x) + w : w);
        }
    }
}

// ---- activations, dropout, sums, copies

FN void act_forward(Program* p, const Op& op) {
    const Value& v = p->values[op.out];
    const Rows r = data_rows(p->values[op.in]), o = data_rows(v);
    const long blocks = blocks_of(p);
    EACH(v) {
        const float* z = p->x[op.in] + at(r, q, c, y);
        float* to = p->x[op.out] + at(o, q, c, y);
        ALONG_ROW(v) st(to + x, curve(op.activation, ld(z + x), op.scale).f);
    }
}

FN void act_along(Program* p, const Op& op) {
    const Value& v = p->values[op.out];
    const Rows r = data_rows(p->values[op.in]), o = data_rows(v);
    const long blocks = blocks_of(p);
    EACH(v) {
        const float *z = p->x[op.in] + at(r, q, c, y), *rz = p->rx[op.in] + at(r, q, c, y);
        float* to = p->rx[op.out] + at(o, q, c, y);
        ALONG_ROW(v) st(to + x, curve(op.activation, ld(z + x), op.scale).d * ld(rz + x));
    }
}

template <bool ALONG>
FN void act_backward(Program* p, const Op& op) {
    const Value& v = p->values[op.out];
    const Rows r = data_rows(p->values[op.in]), d = grad_rows(v);
    const long blocks = blocks_of(p);
    EACH(v) {
        const float *z = p->x[op.in] + at(r, q, c, y), *e = p->g[op.out] + at(d, q, c, y);
        float* to = p->g[op.in] + at(d, q, c, y);
        ALONG_ROW(v) {
            const Curve k = curve(op.activation, ld(z + x), op.scale);
            const vf dy = ld(e + x), w = k.d * dy;
            if (ALONG) {
                const vf rz = ld(p->rx[op.in] + at(r, q, c, y) + x), rdy = ld(p->rg[op.out] + at(d, q, c, y) + x);
                const vf u = k.dd * rz * dy + k.d * rdy;
                float* rto = p->rg[op.in] + at(d, q, c, y) + x;
                st(rto, op.again ? ld(rto) + u : u);
            }
            st(to + x, op.again ? ld(to + x) + w : w);
        }
    }
}

FN void dropout_forward(Program* p, int i, float** data) {
    const Op& op = p->ops[i];
    const Value& v = p->values[op.out];
    const Rows r = data_rows(p->values[op.in]), o = data_rows(v), d = grad_rows(v);
    const long blocks = blocks_of(p);
    EACH(v) {
        const float *z = data[op.in] + at(r, q, c, y), *m = p->mask[i] + at(d, q, c, y);
        float* to = data[op.out] + at(o, q, c, y);
        ALONG_ROW(v) st(to + x, ld(z + x) * ld(m + x));
    }
}

// Gradients that go on as they are, or by a mask.
FN void pass_on(const Program* p, const float* from, const float* mask, float* to, const Value& v, bool again) {
    const long n = blocks_of(p) * plain_size(v, L);
    for (long k = 0; k < n; k += L) {
        vf w = ld(from + k);
        if (mask) w *= ld(mask + k);
        st(to + k, again ? ld(to + k) + w : w);
    }
}

template <bool ALONG>
FN void add_forward(Program* p, const Op& op, float** data) {
    const Value& v = p->values[op.out];
    const Rows a = data_rows(p->values[op.in]), b = data_rows(p->values[op.in2]), o = data_rows(v);
    const long blocks = blocks_of(p);
    EACH(v) {
        const float *f = data[op.in] + at(a, q, c, y), *g = data[op.in2] + at(b, q, c, y), *made = p->x[op.out] + at(o, q, c, y);
        float* to = data[op.out] + at(o, q, c, y);
        ALONG_ROW(v) {
            const vf w = ld(f + x) + ld(g + x);
            st(to + x, !op.relu ? w : ALONG ? (ld(made + x) > vf{} ? w : vf{}) : relu(w));
        }
    }
}

FN void copy_forward(Program* p, const Op& op, float** data) {
    const Value& v = p->values[op.out];
    const Rows r = data_rows(p->values[op.in]), o = data_rows(v);
    const long blocks = blocks_of(p);
    EACH(v) memcpy(data[op.out] + at(o, q, c, y), data[op.in] + at(r, q, c, y), v.w * L * 4);
}

// ---- pooling

struct Window { long y0, y1, x0, x1; };
INLINE Window window(const Op& op, const Value& in, long y, long x) {
    const long a = y * op.sy - op.py, b = x * op.sx - op.px;
    return {std::max<long>(a, 0), std::min<long>(a + op.kh, in.h), std::max<long>(b, 0), std::min<long>(b + op.kw, in.w)};
}

FN void max_forward(Program* p, int i) {
    const Op& op = p->ops[i];
    const Value &in = p->values[op.in], &v = p->values[op.out];
    const Rows r = data_rows(in), o = data_rows(v), d = grad_rows(v);
    const long blocks = blocks_of(p);
    EACH(v) {
        const float* z = p->x[op.in] + at(r, q, c, 0);
        float* to = p->x[op.out] + at(o, q, c, y);
        int32_t* arg = p->arg[i] + at(d, q, c, y);
        for (long x = 0; x < v.w; x++) {
            const Window w = window(op, in, y, x);
            vf m = ld(z + w.y0 * r.row + w.x0 * L);
            vi which = vi{} + (int32_t)(w.y0 * in.w + w.x0);
            for (long a = w.y0; a < w.y1; a++)
                for (long b = w.x0; b < w.x1; b++) {
                    const vf u = ld(z + a * r.row + b * L);
                    const vi over = (u > m) | (u != u);
                    m = over ? u : m;
                    which = over ? vi{} + (int32_t)(a * in.w + b) : which;
                }
            st(to + x * L, op.relu ? relu(m) : m);
            *(vi*)(arg + x * L) = which;
        }
    }
}

FN void max_along(Program* p, int i) {
    const Op& op = p->ops[i];
    const Value &in = p->values[op.in], &v = p->values[op.out];
    const Rows r = data_rows(in), o = data_rows(v), d = grad_rows(v);
    const long blocks = blocks_of(p);
    EACH(v) {
        const float *rz = p->rx[op.in] + at(r, q, c, 0), *made = p->x[op.out] + at(o, q, c, y);
        float* to = p->rx[op.out] + at(o, q, c, y);
        const int32_t* arg = p->arg[i] + at(d, q, c, y);
        for (long x = 0; x < v.w; x++) {
            vf m;
            for (int l = 0; l < L; l++) {
                const long k = arg[x * L + l];
                m[l] = rz[k / in.w * r.row + k % in.w * L + l];
            }
            if (op.relu) m = ld(made + x * L) > vf{} ? m : vf{};
            st(to + x * L, m);
        }
    }
}

FN void max_backward(Program* p, int i, const float* g, float* dx) {
    const Op& op = p->ops[i];
    const Value &in = p->values[op.in], &v = p->values[op.out];
    const Rows d = grad_rows(v), t = grad_rows(in);
    const long blocks = blocks_of(p);
    if (!op.again) memset(dx, 0, blocks * plain_size(in, L) * 4);
    EACH(v) {
        const float* e = g + at(d, q, c, y);
        const int32_t* arg = p->arg[i] + at(d, q, c, y);
        float* to = dx + at(t, q, c, 0);
        for (long x = 0; x < v.w; x++) {
            const Window w = window(op, in, y, x);
            const vf u = ld(e + x * L);
            const vi which = *(const vi*)(arg + x * L);
            for (long a = w.y0; a < w.y1; a++)
                for (long b = w.x0; b < w.x1; b++) {
                    float* k = to + (a * in.w + b) * L;
                    st(k, ld(k) + (which == (int32_t)(a * in.w + b) ? u : vf{}));
                }
        }
    }
}

FN void mean_forward(Program* p, const Op& op, float** data, bool along) {
    const Value &in = p->values[op.in], &v = p->values[op.out];
    const Rows r = data_rows(in), o = data_rows(v);
    const long blocks = blocks_of(p);
    const vf share = all(op.scale);
    EACH(v) {
        const float *z = data[op.in] + at(r, q, c, 0), *made = p->x[op.out] + at(o, q, c, y);
        float* to = data[op.out] + at(o, q, c, y);
        for (long x = 0; x < v.w; x++) {
            const Window w = window(op, in, y, x);
            vf m = {};
            for (long a = w.y0; a < w.y1; a++)
                for (long b = w.x0; b < w.x1; b++) m += ld(z + a * r.row + b * L);
            m *= share;
            st(to + x * L, !op.relu ? m : along ? (ld(made + x * L) > vf{} ? m : vf{}) : relu(m));
        }
    }
}

FN void mean_backward(Program* p, const Op& op, const float* g, float* dx) {
    const Value &in = p->values[op.in], &v = p->values[op.out];
    const Rows d = grad_rows(v), t = grad_rows(in);
    const long blocks = blocks_of(p);
    const vf share = all(op.scale);
    if (!op.again) memset(dx, 0, blocks * plain_size(in, L) * 4);
    EACH(v) {
        const float* e = g + at(d, q, c, y);
        float* to = dx + at(t, q, c, 0);
        for (long x = 0; x < v.w; x++) {
            const Window w = window(op, in, y, x);
            const vf u = ld(e + x * L) * share;
            for (long a = w.y0; a < w.y1; a++)
                for (long b = w.x0; b < w.x1; b++) {
                    float* k = to + (a * in.w + b) * L;
                    st(k, ld(k) + u);
                }
        }
    }
}

// ---- whole networks

// A block of images that are flipped, or cut out of themselves with a border.
FN void load_moved(Program* p, long q, const uint8_t** bytes, const float** floats, int kind, int n, const float* scale,
                   const float* shift, const uint8_t* flip, const int32_t* offset, int crop) {
    const Value& v = p->values[0];
    const Rows r = data_rows(v);
    for (long c = 0; c < v.c; c++)
        for (long y = 0; y < v.h; y++) {
            float* to = p->x[0] + at(r, q, c, y);
            for (long x = 0; x < v.w; x++, to += L) {
                const long j = (c * v.h + y) * v.w + x;
                vf value = {};
                for (int l = 0; l < L; l++) {
                    const long k = std::min<long>(q * L + l, n - 1);
                    const long a = y + (offset ? offset[2 * k] - crop : 0), b0 = x + (offset ? offset[2 * k + 1] - crop : 0);
                    const long b = flip && flip[k] ? v.w - 1 - b0 : b0;
                    const bool inside = a >= 0 && a < v.h && b >= 0 && b < v.w;
                    const long m = (c * v.h + a) * v.w + b;
                    value[l] = !inside ? 0.f : kind ? (float)bytes[l][m] : floats[l][m];
                }
                if (scale) value = value * all(scale[j]) - all(shift[j]);
                st(to, value);
            }
        }
}

// Some pixels of an image, as numbers.
template <class T>
FN void convert(const T* __restrict from, const float* __restrict scale, const float* __restrict shift, float* __restrict to, long n) {
    if (scale)
        for (long x = 0; x < n; x++) to[x] = from[x] * scale[x] - shift[x];
    else
        for (long x = 0; x < n; x++) to[x] = from[x];
}

FN void load(Program* p, const void* images, int kind, const int64_t* places, int n, const float* scale, const float* shift,
             const uint8_t* flip, const int32_t* offset, int crop) {
    const Value& v = p->values[0];
    const Rows r = data_rows(v);
    const long size = v.c * v.h * v.w;
    p->n = n;
    const long blocks = blocks_of(p);
    for (long q = 0; q < blocks; q++) {
        const uint8_t* bytes[L];
        const float* floats[L];
        for (int l = 0; l < L; l++) {
            const long k = std::min<long>(q * L + l, n - 1), i = places ? places[k] : k;
            bytes[l] = (const uint8_t*)images + i * size, floats[l] = (const float*)images + i * size;
        }
        if (flip || offset) {
            load_moved(p, q, bytes, floats, kind, n, scale, shift, flip, offset, crop);
            if (p->rows) turn(p->x[0] + q * size * L, size, 1, p->rows + q * L * padded(size));
            continue;
        }
        // A few pixels of all images as rows, which may be wanted, and then as columns. Without a border an image is one long row.
        const long width = v.pad ? v.w : size;
        for (long j = 0, m; j < size; j += m) {
            m = std::min(AT_ONCE, width - j % width);
            alignas(64) float some[L * AT_ONCE];
            float *to = p->x[0] + at(r, q, j / (v.w * v.h), j / v.w % v.h) + j % v.w * L;
            float* row = p->rows ? p->rows + q * L * padded(size) + j : some;
            const long pitch = p->rows ? padded(size) : AT_ONCE;
            const float *a = scale ? scale + j : nullptr, *b = scale ? shift + j : nullptr;
            for (int l = 0; l < L; l++)
                if (kind) convert(bytes[l] + j, a, b, row + l * pitch, m);
                else convert(floats[l] + j, a, b, row + l * pitch, m);
            turn_back(row, pitch, m, to);
        }
    }
}

FN void mask(Program* p, int i, const float* given) {  // (n, c, h, w), for a dropout
    const Value& v = p->values[p->ops[i].out];
    const long size = v.c * v.h * v.w, blocks = blocks_of(p);
    for (long q = 0; q < blocks; q++)
        for (long j = 0; j < size; j++)
            for (long l = 0; l < L; l++) p->mask[i][(q * size + j) * L + l] = q * L + l < p->n ? given[(q * L + l) * size + j] : 0.f;
}

FN void forward(Program* p, float* W, int update) {
    for (int i = 0; i < p->n_ops; i++) {
        const Op& op = p->ops[i];
        switch (op.kind) {
            case CONV: forward_conv(p, i, W); break;
            case LINEAR: linear_forward<false>(p, i, W, nullptr); break;
            case NORM: norm_forward(p, i, W, update); break;
            case ACT: act_forward(p, op); break;
            case MAXPOOL: max_forward(p, i); break;
            case AVGPOOL: mean_forward(p, op, p->x, false); break;
            case ADD: add_forward<false>(p, op, p->x); break;
            case COPY: copy_forward(p, op, p->x); break;
            case DROPOUT: dropout_forward(p, i, p->x); break;
        }
    }
}

FN void collect(const Program* p, float** data, float* to) {
    for (int k = 0; k < p->n_out; k++) {
        const long classes = p->values[p->out[k]].c;
        const float* z = data[p->out[k]];
        for (long i = 0; i < p->n; i++)
            for (long c = 0; c < classes; c++) *to++ = z[(i / L * classes + c) * L + i % L];
    }
}

FN void logits(Program* p, float* to) { collect(p, p->x, to); }

FN void read(const Program* p, int value, float* to, long stride) {
    const Value& v = p->values[value];
    const Rows r = data_rows(v);
    const long blocks = blocks_of(p);
    EACH(v) {
        const float* from = p->x[value] + at(r, q, c, y);
        const long there = std::min<long>(L, p->n - q * L);
        float* row = to + q * L * stride + (c * v.h + y) * v.w;
        if (there == L)
            for (long x = 0; x < v.w; x++) {
                const vf all_ = ld(from + x * L);
                UNROLL for (int l = 0; l < L; l++) row[l * stride + x] = all_[l];
            }
        else
            for (long l = 0; l < there; l++)
                for (long x = 0; x < v.w; x++) row[l * stride + x] = from[x * L + l];
    }
}

FN void add_up(const Program* p, int value, double* to) {
    const Value& v = p->values[value];
    const Rows r = data_rows(v);
    const long blocks = blocks_of(p);
    for (long q = 0; q < blocks; q++)
        for (long c = 0; c < v.c; c++) {
            vf sum = {};
            for (long y = 0; y < v.h; y++) {
                const float* from = p->x[value] + at(r, q, c, y);
                ALONG_ROW(v) sum += ld(from + x);
            }
            to[c] += total(present(p, q) > vf{} ? sum : vf{});
        }
}

// The gradient of a value, as it is before its maker goes on with it; lanes without a sample have none.
FN void watch(const Program* p, int value) {
    const Value& v = p->values[value];
    const long blocks = blocks_of(p), size = v.c * v.h * v.w;
    for (long q = 0; q < blocks; q++)
        for (long j = 0; j < size; j++) p->watched[value][j] += total(ld(p->g[value] + (q * size + j) * L));
}

FN void put(Program* p, const float* d) {  // d(loss)/d(outputs), where going back begins
    for (int k = 0; k < p->n_out; k++) {
        const long classes = p->values[p->out[k]].c;
        float* g = p->g[p->out[k]];
        memset(g, 0, blocks_of(p) * classes * L * 4);
        for (long i = 0; i < p->n; i++)
            for (long c = 0; c < classes; c++) g[(i / L * classes + c) * L + i % L] = *d++;
    }
}

// The mean cross-entropy times `share`, and what it sends back. Logits of classes that are not held send back nothing.
FN double loss(Program* p, const int64_t* y, float share) {
    const long classes = p->values[p->out[0]].c, blocks = blocks_of(p);
    const float each = share / p->n, none = p->as_zero ? 0.f : -INFINITY;
    auto seen = [&](long c) { return !p->held || p->held[c]; };
    double sum = 0;
    for (long q = 0; q < blocks; q++) {
        const float* z = p->x[p->out[0]] + q * classes * L;
        float* g = p->g[p->out[0]] + q * classes * L;
        vf m = all(none), s = {};
        if (!p->held) m = ld(z);
        for (long c = 0; c < classes; c++)
            if (seen(c)) m = ld(z + c * L) > m ? ld(z + c * L) : m;
        for (long c = 0; c < classes; c++) {
            const vf e = seen(c) ? exp_of(ld(z + c * L) - m) : p->as_zero ? exp_of(-m) : vf{};
            st(g + c * L, seen(c) ? e : vf{});
            s += e;
        }
        vf part = {};
        for (long l = 0; l < L; l++) {
            const long i = q * L + l;
            if (i >= p->n) continue;
            sum += std::log((double)s[l]) - ((double)(seen(y[i]) ? z[y[i] * L + l] : none) - m[l]);
            part[l] = each / s[l];
        }
        for (long c = 0; c < classes; c++) st(g + c * L, part > vf{} ? ld(g + c * L) * part : part);
        for (long l = 0; l < L && q * L + l < p->n; l++)
            if (seen(y[q * L + l])) g[y[q * L + l] * L + l] -= each;
    }
    return sum * each;
}

template <bool ALONG>
FN void back(Program* p, float* W, const float* V, float* G, bool add) {
    for (int i = p->n_ops - 1; i >= 0; i--) {
        const Op& op = p->ops[i];
        const bool more = add || op.adds;
        float *g = p->g[op.out], *rg = p->rg[op.out];
        if (!g) continue;
        if (!ALONG && p->watched[op.out]) watch(p, op.out);
        if (op.relu && op.kind != CONV) {
            cut_off(p, op, g);
            if (ALONG) cut_off(p, op, rg);
        }
        switch (op.kind) {
            case CONV:
                if (ALONG) conv_backward<ALONG>(p, i, W, V, G, more);
                else backward_conv(p, i, W, G, more);
                continue;
            case LINEAR: linear_backward<ALONG>(p, i, W, V, G, more); continue;
            case NORM: norm_backward<ALONG>(p, i, W, V, G, more); continue;
        }
        if (op.in2 >= 0 && op.needs2) {
            const Value& v = p->values[op.out];
            pass_on(p, g, nullptr, p->g[op.in2], v, op.again2);
            if (ALONG) pass_on(p, rg, nullptr, p->rg[op.in2], v, op.again2);
        }
        if (!op.needs) continue;
        for (int along = 0; along < (ALONG ? 2 : 1); along++) {
            float *from = along ? rg : g, *to = (along ? p->rg : p->g)[op.in];
            switch (op.kind) {
                case ACT: if (!along) act_backward<ALONG>(p, op); break;
                case MAXPOOL: max_backward(p, i, from, to); break;
                case AVGPOOL: mean_backward(p, op, from, to); break;
                case ADD: case COPY: pass_on(p, from, nullptr, to, p->values[op.out], op.again); break;
                case DROPOUT: pass_on(p, from, p->mask[i], to, p->values[op.out], op.again); break;
            }
        }
    }
}

FN void backward(Program* p, float* W, float* G, int add) { back<false>(p, W, nullptr, G, add); }

// How what the mean cross-entropy sends back changes along the direction: by the derivative of the softmax.
FN void loss_along(Program* p, const int64_t* y) {
    const long classes = p->values[p->out[0]].c, blocks = blocks_of(p);
    const float each = 1.f / p->n;
    for (long q = 0; q < blocks; q++) {
        const long at = q * classes * L;
        const float *g = p->g[p->out[0]] + at, *r = p->rx[p->out[0]] + at;
        float* to = p->rg[p->out[0]] + at;
        memcpy(to, g, classes * L * 4);
        for (long l = 0; l < L && q * L + l < p->n; l++) to[y[q * L + l] * L + l] += each;  // the probabilities, over n
        vf mean = {};
        for (long c = 0; c < classes; c++) mean += ld(to + c * L) * ld(r + c * L);
        mean *= (float)p->n;
        for (long c = 0; c < classes; c++) st(to + c * L, ld(to + c * L) * (ld(r + c * L) - mean));
    }
}

// With `y`, what `loss` sends back follows the outputs, so that G is of the loss; else it is given, and does not change.
FN void along(Program* p, float* W, const float* V, const int64_t* y, float* out, float* G) {
    for (int i = 0; i < p->n_ops; i++) {
        const Op& op = p->ops[i];
        switch (op.kind) {
            case CONV: conv_forward<true>(p, i, W, V); break;
            case LINEAR: linear_forward<true>(p, i, W, V); break;
            case NORM: norm_along(p, i, W, V); break;
            case ACT: act_along(p, op); break;
            case MAXPOOL: max_along(p, i); break;
            case AVGPOOL: mean_forward(p, op, p->rx, true); break;
            case ADD: add_forward<true>(p, op, p->rx); break;
            case COPY: copy_forward(p, op, p->rx); break;
            case DROPOUT: dropout_forward(p, i, p->rx); break;
        }
    }
    if (out) collect(p, p->rx, out);
    if (y) loss_along(p, y);
    else
        for (int k = 0; k < p->n_out; k++) memset(p->rg[p->out[k]], 0, blocks_of(p) * p->values[p->out[k]].c * L * 4);
    back<true>(p, W, V, G, false);
}

// Weights `from` to `to` follow their gradient.
FN void descend(float* W, const float* G, long from, long to, const Update& u, const Rates& r) {
    float *__restrict w = W, *__restrict first = u.first, *__restrict second = u.second;
    const float* __restrict g = G;
    float none = 0;
    switch (u.kind) {
        case SGD:
            if (first)
                for (long i = from; i < to; i++) w[i] = sgd<float, true>(w[i], r.share * g[i], first[i], r);
            else
                for (long i = from; i < to; i++) w[i] = sgd<float, false>(w[i], r.share * g[i], none, r);
            return;
        case ADAGRAD:
            for (long i = from; i < to; i++) {
                const float v = w[i] * r.decay + r.share * g[i];
                first[i] += v * v;
                w[i] -= r.lr * v / (__builtin_sqrtf(first[i]) + r.eps);
            }
            return;
        default:
            for (long i = from; i < to; i++) {
                const float v = w[i] * r.decay + r.share * g[i];
                first[i] += r.new1 * (v - first[i]);
                second[i] = second[i] * r.beta2 + r.new2 * (v * v);
                w[i] = w[i] * r.keep - r.rate * (first[i] / (__builtin_sqrtf(second[i]) * r.root + r.eps));
            }
    }
}

FN void bend(const float* W, float* G, long n, const Update& u) {
    const float *__restrict w = W, *__restrict to = u.to, *__restrict push = u.push;
    float* __restrict g = G;
    const float pull = u.pull;
    if (to)
        for (long i = 0; i < n; i++) g[i] += pull * (w[i] - to[i]);
    if (push)
        for (long i = 0; i < n; i++) g[i] += push[i];
}

FN double squares(const float* g, long n) {  // in pairs of fixed places, so that it is the same everywhere
    double sum[8] = {};
    for (long i = 0; i < n; i++) sum[i % 8] += (double)g[i] * g[i];
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

FN void spread(const float* rows, long stride, long n, long size, const double* shares, double* squares) {
    double mean[AT_ONCE];
    for (long at = 0; at < size; at += AT_ONCE) {
        const long some = std::min(AT_ONCE, size - at);
        memset(mean, 0, sizeof(mean));
        for (long k = 0; k < n; k++) {
            const float* row = rows + k * stride + at;
            for (long x = 0; x < some; x++) mean[x] += shares[k] * row[x];
        }
        for (long k = 0; k < n; k++) {
            const float* row = rows + k * stride + at;
            double sum[8] = {};
            long x = 0;
            for (; x + 8 <= some; x += 8)
                UNROLL for (int l = 0; l < 8; l++) {
                    const double d = row[x + l] - mean[x + l];
                    sum[l] += d * d;
                }
            for (; x < some; x++) sum[0] += (row[x] - mean[x]) * (row[x] - mean[x]);
            squares[k] += ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
        }
    }
}

FN void weigh(const float* rows, long stride, long n, long size, const double* weights, double* sums) {
    for (long at = 0; at < size; at += AT_ONCE) {
        const long some = std::min(AT_ONCE, size - at);
        for (long k = 0; k < n; k++) {
            const float* row = rows + k * stride + at;
            for (long x = 0; x < some; x++) sums[at + x] += weights[k] * row[x];
        }
    }
}

}  // namespace ISA
}  // namespace

#endif
