// Where tensors of a Python list are, and how they are stored, asked of their framework through DLPack's interface.
#pragma once

#include <cstdint>

// A tensor, as DLPack lays it out.
struct Description {
    void* data;
    int32_t device_type, device_id, axes;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t* shape;
    const int64_t* strides;
    uint64_t offset;
};

// Functions of the interpreter and of the framework, found by Python. They need the interpreter's lock.
struct Interpreter {
    void* (*item)(void* list, int64_t place);
    int (*next)(void* dictionary, int64_t* place, void** key, void** value);
    void* (*type)(void* object);
    void (*release)(void* object);
    void (*clear_error)();
    int (*describe)(void* object, Description* description);
};

// What was found, word by word: written one after the other, or compared with what is there.
struct Words {
    int64_t* place;
    const int64_t* const end;
    const bool compares;
    int64_t count = 0;
    bool same = true;

    void take(int64_t word) {
        count++;
        if (place == end) {
            same = same && !compares;
        } else if (compares) {
            same = same && *place++ == word;
        } else {
            *place++ = word;
        }
    }
    void take(const void* object) { take(reinterpret_cast<int64_t>(object)); }
};

// How a tensor is stored. The answer is where it is; -1 if it cannot be described.
inline int64_t take_form(const Interpreter& python, void* tensor, Words& words) {
    Description x{};
    if (python.describe(tensor, &x)) {
        python.clear_error();
        words.same = false;
        return -1;
    }
    words.take(int64_t(x.device_type) << 32 | uint32_t(x.device_id));
    words.take(int64_t(x.axes) << 32 | x.code << 24 | x.bits << 16 | x.lanes);
    for (int32_t axis = 0; axis < x.axes; axis++) {
        words.take(x.shape[axis]);
        words.take(x.strides ? x.strides[axis] : 0);
    }
    return reinterpret_cast<int64_t>(x.data) + int64_t(x.offset);
}

// A gradient may be another tensor at another place, of the same type and form.
inline void take_gradient(const Interpreter& python, void* tensor, int64_t* address, Words& words) {
    void* type = python.type(tensor);
    words.take(type);
    python.release(type);
    *address = take_form(python, tensor, words);
}

// Parameters and their state stay where they are.
inline void take_kept(const Interpreter& python, void* tensor, Words& words) {
    words.take(tensor);
    words.take(take_form(python, tensor, words));
}

inline void take_states(const Interpreter& python, void* states, Words& words) {
    void *parameter, *state, *key, *entry;
    for (int64_t i = 0; words.same && python.next(states, &i, &parameter, &state);) {
        words.take(parameter);
        words.take(state);
        for (int64_t k = 0; words.same && python.next(state, &k, &key, &entry);) {
            words.take(key);
            take_kept(python, entry, words);
        }
    }
}
