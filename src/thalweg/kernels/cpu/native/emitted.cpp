// The emitted functions, compiled once for each vector width: THALWEG_LEVEL names their table.

#include "passes.h"

#include "emitted.h"

extern const Functions* const NAMED(emitted_, THALWEG_LEVEL);
const Functions* const NAMED(emitted_, THALWEG_LEVEL) = EMITTED;
