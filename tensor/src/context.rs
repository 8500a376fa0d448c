//! [`Context`]: thread-local state that operations read (random key, ledger category, mode bits) and that worker
//! threads take over from the thread they work for. A [`ContextGuard`] restores it.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::host_memory::Place;
use crate::{Category, HostMemory, RngKey};

/// What operations on this thread take from their surroundings. A thread that works on another's behalf captures
/// it there ([`Context::current`]) and enters it here ([`Context::enter`]).
///
/// [`RngKey`] says how random draws are made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Context {
    /// The key of random draws: the run's seed and the step's number; a site adds its own. Steps count themselves until one is
    /// set ([`RngKey::is_counted`]).
    pub rng: RngKey,
    /// How many random tensors were made since the seed or the step was last set or counted on: the next one's number.
    pub drawn: u64,
    /// A number that is new each time a seed or a step is set, so that a key can be told from an equal one set before.
    pub seeding: u64,
    /// Where the first row of this thread's share of the batch lies in the global batch, so that a random draw
    /// over activations is the same however the batch is cut.
    pub batch_offset: u64,
    /// The ledger's category for new storage.
    pub category: Category,
    /// The memory of new storage on CPU devices.
    pub host_memory: HostMemory,
    /// Modes of the crates above, a bit each, all 0 at a thread's start. This crate does not know what they mean: they only
    /// travel with the context. Bit 0 is the kernels', bits 1 to 5 autograd's; an embedding program may use bits 16 to 31.
    pub flags: u32,
}

impl Context {
    /// What a thread starts with.
    const START: Context = Context {
        rng: RngKey::COUNTED,
        drawn: 0,
        seeding: 0,
        batch_offset: 0,
        category: Category::Activations,
        host_memory: HostMemory(Place::Pageable),
        flags: 0,
    };
}

impl Default for Context {
    fn default() -> Context {
        Context::START
    }
}

thread_local! {
    static CURRENT: Cell<Context> = const { Cell::new(Context::START) };
    /// The changes of all live guards, the latest last.
    static GUARDS: RefCell<Vec<Set>> = const { RefCell::new(Vec::new()) };
    /// The last guard's number.
    static LAST: Cell<u64> = const { Cell::new(0) };
    /// How many [`PassGuard`]s live.
    static PASSES: Cell<u32> = const { Cell::new(0) };
}

/// What one guard has set.
struct Set {
    guard: u64,
    fields: Fields,
    /// The fields' values before this guard. They are restored when it is dropped, unless a later guard has set them.
    before: Context,
}

/// Some of the context's fields: the lower 32 bits are flags, each higher bit is one of the other fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fields(u64);

macro_rules! fields {
    ($($name:ident = $bit:literal: $($field:ident).+;)*) => {
        impl Fields {
            $(
                #[allow(dead_code)] // not each is set alone
                const $name: Fields = Fields(1 << $bit);
            )*
            const ALL: Fields = Fields(u32::MAX as u64 $(| 1 << $bit)*);

            /// Those in which two contexts differ.
            fn that_differ(a: &Context, b: &Context) -> Fields {
                Fields(u64::from(a.flags ^ b.flags) $(| (u64::from(a.$($field).+ != b.$($field).+) << $bit))*)
            }

            /// Copies these.
            fn copy(self, from: &Context, to: &mut Context) {
                let flags = self.0 as u32;
                to.flags = to.flags & !flags | from.flags & flags;
                $(if self.0 & 1 << $bit != 0 {
                    to.$($field).+ = from.$($field).+;
                })*
            }
        }
    };
}

fields! {
    SEED = 32: rng.seed;
    STEP = 33: rng.step;
    DRAWN = 34: drawn;
    SEEDING = 35: seeding;
    BATCH_OFFSET = 36: batch_offset;
    CATEGORY = 37: category;
    HOST_MEMORY = 38: host_memory;
}

impl Fields {
    const NONE: Fields = Fields(0);
    /// The fields that restart the random draws when they change.
    const KEY: Fields = Fields::SEED.and(Fields::STEP);

    const fn and(self, other: Fields) -> Fields {
        Fields(self.0 | other.0)
    }

    fn without(self, other: Fields) -> Fields {
        Fields(self.0 & !other.0)
    }

    fn both(self, other: Fields) -> Fields {
        Fields(self.0 & other.0)
    }
}

impl Context {
    /// This thread's context.
    #[inline]
    pub fn current() -> Context {
        CURRENT.get()
    }

    /// Makes this the thread's context, all of it, until the guard is dropped.
    pub fn enter(self) -> ContextGuard {
        ContextGuard::set(Fields::ALL, self)
    }

    /// Changes the current context until the guard is dropped. The guard undoes what `change` has changed and nothing else, so
    /// guards may be dropped in any order.
    ///
    /// ```
    /// use phalanx_tensor::Context;
    /// let guard = Context::with(|c| c.batch_offset = 7);
    /// assert_eq!(Context::current().batch_offset, 7);
    /// drop(guard);
    /// assert_eq!(Context::current().batch_offset, 0);
    /// ```
    pub fn with(change: impl FnOnce(&mut Context)) -> ContextGuard {
        let before = Context::current();
        let mut context = before;
        change(&mut context);
        let mut fields = Fields::that_differ(&before, &context);
        if fields.both(Fields::KEY) != Fields::NONE {
            context.begin_draws();
            fields = fields.and(Fields::DRAWN).and(Fields::SEEDING);
        }
        ContextGuard::set(fields, context)
    }

    /// Until the guard is dropped, the flags that `mask` names are those of `flags`, whatever was set before.
    pub fn with_flags(mask: u32, flags: u32) -> ContextGuard {
        let before = Context::current();
        let context = Context { flags: before.flags & !mask | flags & mask, ..before };
        ContextGuard::set(Fields(u64::from(mask)), context)
    }

    /// Sets the seed of this thread's random draws and counts its steps from 0 again. There is no guard: the seed stays until another is
    /// set. The same draws follow the same seed. Threads that this one starts as ranks or workers inherit it.
    pub fn manual_seed(seed: u64) {
        let mut context = Context { rng: RngKey { seed, ..RngKey::COUNTED }, ..Context::current() };
        context.begin_draws();
        CURRENT.set(context);
    }

    /// Until the guard is dropped, backward passes end no step: they are parts of one pass, and draw as one. When it is dropped,
    /// that pass has ended. Guards inside another have no effect.
    pub fn one_pass() -> PassGuard {
        PASSES.set(PASSES.get() + 1);
        PassGuard { thread: PhantomData }
    }

    /// A backward pass of this thread has ended: the next forward pass uses new random numbers, unless the step was
    /// set.
    pub fn end_pass() {
        let mut context = CURRENT.get();
        if PASSES.get() == 0 && context.rng.is_counted() {
            context.rng.step = context.rng.next_step();
            context.drawn = 0;
            CURRENT.set(context);
        }
    }

    /// The number of the next random tensor under the current key; there is none of that number again.
    pub fn next_draw() -> u64 {
        let context = CURRENT.get();
        CURRENT.set(Context { drawn: context.drawn + 1, ..context });
        context.drawn
    }

    fn begin_draws(&mut self) {
        static SEEDINGS: AtomicU64 = AtomicU64::new(1);
        self.drawn = 0;
        self.seeding = SEEDINGS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Undoes what was set when it was made. Guards may be dropped in any order: a field that several live guards have set is
/// what the latest of them says.
#[must_use = "what was set is undone when the guard is dropped"]
#[derive(Debug)]
pub struct ContextGuard {
    number: u64,
    thread: PhantomData<*const ()>,
}

impl ContextGuard {
    fn set(fields: Fields, context: Context) -> ContextGuard {
        let number = LAST.get() + 1;
        LAST.set(number);
        let before = CURRENT.replace(context);
        // A thread that ends has nothing to come back to.
        let _ = GUARDS.try_with(|guards| guards.borrow_mut().push(Set { guard: number, fields, before }));
        ContextGuard { number, thread: PhantomData }
    }
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        let _ = GUARDS.try_with(|guards| {
            let guards = &mut *guards.borrow_mut();
            let Some(place) = guards.iter().rposition(|set| set.guard == self.number) else { return };
            let Set { mut fields, before, .. } = guards.remove(place);
            for later in &mut guards[place..] {
                let both = fields.both(later.fields);
                both.copy(&before, &mut later.before);
                fields = fields.without(both);
            }
            let mut context = CURRENT.get();
            fields.copy(&before, &mut context);
            CURRENT.set(context);
        });
    }
}

/// The end of a pass; see [`Context::one_pass`].
#[must_use = "the pass ends when the guard is dropped"]
#[derive(Debug)]
pub struct PassGuard {
    thread: PhantomData<*const ()>,
}

impl Drop for PassGuard {
    fn drop(&mut self) {
        PASSES.set(PASSES.get().saturating_sub(1));
        Context::end_pass();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two modes of crates above, as they have them: a bit that is set turns one off.
    const NO_GRAD: u32 = 2;
    const EVALUATION: u32 = 1 << 31;

    fn with_grad(grad: bool) -> ContextGuard {
        Context::with_flags(NO_GRAD, if grad { EVALUATION } else { u32::MAX })
    }

    fn grad() -> bool {
        Context::current().flags & NO_GRAD == 0
    }

    fn train() -> bool {
        Context::current().flags & EVALUATION == 0
    }

    #[test]
    fn guards_undo_what_they_set_in_any_order_of_dropping() {
        let fields = || (grad(), train(), Context::current().batch_offset);
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut guards = [
                Some(with_grad(false)),
                Some(Context::with(|c| c.flags |= EVALUATION)),
                Some(Context::with(|c| c.batch_offset = 7)),
            ];
            assert_eq!(fields(), (false, false, 7));
            let mut wanted = (false, false, 7);
            for i in order {
                guards[i] = None;
                match i {
                    0 => wanted.0 = true,
                    1 => wanted.1 = true,
                    _ => wanted.2 = 0,
                }
                assert_eq!(fields(), wanted, "dropped {i} of {order:?}");
            }
        }
    }

    #[test]
    fn a_tuple_of_guards_leaves_nothing_behind() {
        {
            let _both = (with_grad(false), Context::with(|c| c.flags |= EVALUATION));
        }
        assert_eq!(Context::current(), Context::default());
        assert!(std::thread::spawn(grad).join().unwrap());
    }

    #[test]
    fn the_latest_live_guard_of_a_field_says_what_it_is() {
        let (off, on, again) = (with_grad(false), with_grad(true), with_grad(false));
        drop(on);
        assert!(!grad());
        drop(off);
        assert!(!grad(), "the guard that is left says so");
        drop(again);
        assert!(grad());
    }

    #[test]
    fn an_equal_setting_outlives_the_guard_before_it() {
        let (first, second) = (with_grad(false), with_grad(false));
        drop(first);
        assert!(!grad());
        drop(second);
        assert!(grad());
    }

    #[test]
    fn an_entered_context_goes_as_a_whole() {
        let captured = Context { flags: EVALUATION, batch_offset: 3, ..Context::default() };
        let before = Context::with(|c| c.batch_offset = 1);
        let entered = captured.enter();
        let after = with_grad(false);
        drop(entered);
        assert_eq!((train(), Context::current().batch_offset), (true, 1));
        assert!(!grad());
        drop((before, after));
        assert_eq!(Context::current(), Context::default());
    }

    #[test]
    fn a_panic_that_unwinds_undoes_what_was_set() {
        let panicked = std::panic::catch_unwind(|| {
            let _first = with_grad(false);
            let _second = Context::with(|c| c.rng.step = 3);
            panic!("on purpose");
        });
        assert!(panicked.is_err());
        assert_eq!(Context::current(), Context::default());
    }

    #[test]
    fn steps_count_themselves_until_one_is_set() {
        let start = Context::current().rng;
        Context::end_pass();
        let second = Context::current().rng;
        assert_ne!(start, second);
        {
            let _set = Context::with(|c| c.rng.step = 0);
            Context::end_pass();
            assert_eq!(Context::current().rng.step, 0);
        }
        assert_eq!(Context::current().rng, second);
        {
            let _pass = Context::one_pass();
            let _inner = Context::one_pass();
            Context::end_pass();
            assert_eq!(Context::current().rng, second);
        }
        assert_ne!(Context::current().rng, second);
        let _evaluation = Context::with_flags(EVALUATION, EVALUATION);
        let before = Context::current().rng;
        Context::end_pass();
        drop(_evaluation);
        assert_ne!(Context::current().rng, before, "other guards do not undo the count");
    }

    #[test]
    fn a_key_that_is_set_again_draws_again() {
        let draws = || [Context::next_draw(), Context::next_draw()];
        assert_eq!(draws(), [0, 1]);
        let seeded = || {
            let _seed = Context::with(|c| c.rng.seed = 5);
            (draws(), Context::current().seeding)
        };
        let (first, second) = (seeded(), seeded());
        assert_eq!((first.0, second.0), ([0, 1], [0, 1]));
        assert_ne!(first.1, second.1);
        assert_eq!(draws(), [2, 3]);
        Context::manual_seed(3);
        assert_eq!((draws(), Context::current().rng.seed), ([0, 1], 3));
    }
}
