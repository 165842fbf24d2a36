// Where tensors of a Python list are, and how they are stored, asked of torch through its C interface.
#pragma once

#include <cstdint>

// Functions of the interpreter and of torch, found by Python. They need the interpreter's lock.
struct Interpreter {
    void* (*item)(void* list, int64_t place);
    int64_t (*size)(void* list);
    int (*set)(void* list, int64_t place, void* object);
    void* (*attribute)(void* object, void* name);
    int (*next)(void* dictionary, int64_t* place, void** key, void** value);
    void* (*type)(void* object);
    void (*release)(void* object);
    int32_t (*layout)(void* tensor, int32_t* found);
    int32_t (*dtype)(void* tensor, int32_t* found);
    int32_t (*device_type)(void* tensor, int32_t* found);
    int32_t (*device_index)(void* tensor, int32_t* found);
    int32_t (*axes)(void* tensor, int64_t* found);
    int32_t (*sizes)(void* tensor, const int64_t** found);
    int32_t (*strides)(void* tensor, const int64_t** found);
    int32_t (*data)(void* tensor, void** found);
    // Where the object of a tensor holds what these functions take.
    int64_t offset;
    // Where a tensor holds the word of its dispatch keys, and the bit of it that says: what it is, is the negative of
    // what lies in memory.
    int64_t keys;
    uint64_t negative;

    bool is_negative(void* tensor) const {
        const char* held = *static_cast<const char* const*>(tensor);
        return *reinterpret_cast<const uint64_t*>(held + keys) & negative;
    }
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

// What a tensor that is stored by strides has of them. The answer is where it is; -1 if that cannot be told.
inline int64_t take_strides(const Interpreter& python, void* tensor, Words& words) {
    int32_t dtype = 0;
    int64_t axes = 0;
    const int64_t *sizes = nullptr, *strides = nullptr;
    void* data = nullptr;
    if (python.dtype(tensor, &dtype) || python.axes(tensor, &axes) || python.sizes(tensor, &sizes) ||
        python.strides(tensor, &strides) || python.data(tensor, &data)) {
        words.same = false;
        return -1;
    }
    words.take(int64_t(dtype) << 32 | axes);
    for (int64_t axis = 0; axis < axes; axis++) {
        words.take(sizes[axis]);
        words.take(strides[axis]);
    }
    return reinterpret_cast<int64_t>(data);
}

// A gradient may be another tensor at another place, of the same type and form.
inline int64_t take_gradient(const Interpreter& python, void* object, int32_t* negated, Words& words) {
    void* type = python.type(object);
    words.take(type);
    python.release(type);
    if (!words.same) return -1;  // it may be no tensor
    void* tensor = static_cast<char*>(object) + python.offset;
    int32_t layout = 0, device_type = 0, device_index = 0;
    const bool failed = python.layout(tensor, &layout) || python.device_type(tensor, &device_type) ||
                        python.device_index(tensor, &device_index);
    words.take(int64_t(layout) << 32 | uint32_t(device_type) << 16 | uint16_t(device_index));
    words.same = words.same && !failed;
    if (words.same && python.is_negative(tensor)) *negated = 1;
    return words.same ? take_strides(python, tensor, words) : -1;  // it may have none
}

// Parameters and their state stay where they are: the same objects, which were taken before, of the same tensors.
inline void take_kept(const Interpreter& python, void* object, Words& words) {
    if (!words.same) return;  // it may be no tensor
    void* tensor = static_cast<char*>(object) + python.offset;
    words.take(*static_cast<void**>(tensor));
    if (!words.same) return;
    words.take(int64_t(python.is_negative(tensor)));
    words.take(take_strides(python, tensor, words));
}

inline void take_states(const Interpreter& python, void* states, Words& words) {
    void *parameter, *state, *key, *entry;
    for (int64_t i = 0; words.same && python.next(states, &i, &parameter, &state);) {
        words.take(parameter);
        words.take(state);
        for (int64_t k = 0; words.same && python.next(state, &k, &key, &entry);) {
            words.take(key);
            words.take(entry);
            take_kept(python, entry, words);
        }
    }
}
