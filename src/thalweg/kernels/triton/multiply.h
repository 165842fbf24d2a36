// Products of stacks of float32 matrices by cuBLAS, which knows a good kernel for each. XLA would try many.

namespace {

struct Blas {
    int (*create)(void**);
    int (*set_stream)(void*, void*);
    int (*set_workspace)(void*, void*, size_t);
    int (*multiply)(void*, int, int, int, int, int, const void*, const void*, int, int, long long, const void*, int,
                    int, long long, const void*, void*, int, int, long long, int, int, int);
    bool found = false;

    Blas() {
        void* library = nullptr;
        for (int how : {RTLD_NOLOAD, 0})  // first the one that XLA uses
            for (const char* name : {"libcublas.so.13", "libcublas.so.12"})
                if (!library) library = dlopen(name, RTLD_NOW | how);
        if (!library) return;
        const auto get = [&](auto& to, const char* name) {
            to = reinterpret_cast<std::decay_t<decltype(to)>>(dlsym(library, name));
            return to != nullptr;
        };
        found = get(create, "cublasCreate_v2") && get(set_stream, "cublasSetStream_v2") &&
                get(set_workspace, "cublasSetWorkspace_v2") && get(multiply, "cublasGemmStridedBatchedEx");
    }
};

const Blas& blas() {
    static const Blas* found = new Blas;
    return *found;
}

std::map<Context, void*> handles;

// form: of both factors T if they are transposes of what is in memory; and F for full precision, else TF32.
// To the library, rows are columns: it multiplies the transposes in the other order.
int multiply(const XLA_FFI_CallFrame* frame, Context context, void* stream) {
    std::lock_guard<std::mutex> lock(mutex);
    void*& handle = handles[context];
    if (!handle)
        if (int code = blas().create(&handle)) return code;
    if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return 0;
    const char* form = static_cast<const XLA_FFI_ByteSpan*>(frame->attrs.attrs[0])->ptr;
    const auto &a = argument(frame, 0), &b = argument(frame, 1), &made = result(frame, 0), &scratch = result(frame, 1);
    const bool a_turned = form[0] == 'T', b_turned = form[1] == 'T';
    const int64_t rows = made.dims[1], columns = made.dims[2], depth = a.dims[a_turned ? 1 : 2];
    const float one = 1, zero = 0;
    if (int code = blas().set_stream(handle, stream)) return code;
    if (int code = blas().set_workspace(handle, scratch.data, size_t(scratch.dims[0]))) return code;
    return blas().multiply(handle, b_turned, a_turned, int(columns), int(rows), int(depth), &one, b.data, 0,
                           int(b.dims[2]), b.dims[1] * b.dims[2], a.data, 0, int(a.dims[2]), a.dims[1] * a.dims[2],
                           &zero, made.data, 0, int(columns), rows * columns, int(made.dims[0]),
                           form[2] == 'F' ? 68 : 77, -1);  // cuBLAS's numbers of float32's precisions; its own choice
}

}  // namespace

EXPORTED int thalweg_multiplies() { return driver().found && blas().found; }

EXPORTED XLA_FFI_Error* thalweg_multiply(XLA_FFI_CallFrame* frame) {
    if (is_asked(frame, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE)) return nullptr;
    int code = 0;
    const auto work = [&](Context context, void* stream) { return multiply(frame, context, stream); };
    if (XLA_FFI_Error* error = run_on_stream(frame, &code, work)) return error;
    return code ? fail(frame, "thalweg: cuBLAS cannot multiply: status " + std::to_string(code)) : nullptr;
}
