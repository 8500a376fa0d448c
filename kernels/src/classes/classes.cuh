// The targets of a loss over classes. Macro: ELEMENT, the logits' type.
#pragma once

struct Targets {
    const i64* classes_of;
    const ELEMENT* weight; // null: all 1
    i64 ignored;
    u64 classes, items;
    Faults* faults;
    u32 code, unused;

    // An item's class; -1 if it is ignored, or is none, which is reported.
    DEVICE i64 operator[](u64 item) const {
        const i64 found = classes_of[item];
        if (found == ignored) return -1;
        if ((u64)found < classes) return found;
        fault(faults, code, item, found, classes);
        return -1;
    }

    DEVICE f64 weight_of(i64 found) const { return weight ? (f64)widen(weight[found]) : 1.0; }
};

// What an item's loss is multiplied with in the result: known to the host, or to the device alone.
struct Factor {
    const f64* found;
    f64 given;

    DEVICE f64 value() const { return found ? *found : given; }
};
