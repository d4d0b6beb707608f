//! Work that is given up between two of its operations, because it is no longer wanted.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// With this in its hands, a thread leaves its work as with a panic, but without the message of one.
struct Cancelled;

thread_local! {
    static IS_UNWANTED: RefCell<Option<Box<dyn Fn() -> bool>>> = const { RefCell::new(None) };
}

/// Runs `work`; `None` where a [`check`] of this thread found that it `is_unwanted`. What `work` was changing is then left
/// half changed.
pub fn unless<R>(is_unwanted: impl Fn() -> bool + 'static, work: impl FnOnce() -> R) -> Option<R> {
    let before = IS_UNWANTED.replace(Some(Box::new(is_unwanted)));
    let result = catch_unwind(AssertUnwindSafe(work));
    IS_UNWANTED.set(before);
    match result {
        Ok(result) => Some(result),
        Err(panic) if panic.is::<Cancelled>() => None,
        Err(panic) => resume_unwind(panic),
    }
}

/// A point where work can be given up.
pub fn check() {
    if IS_UNWANTED.with_borrow(|is_unwanted| is_unwanted.as_ref().is_some_and(|is_unwanted| is_unwanted())) {
        resume_unwind(Box::new(Cancelled));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn unwanted_work_ends_at_its_next_check_and_other_work_is_not_asked() {
        let (is_unwanted, done) = (Rc::new(Cell::new(false)), Cell::new(0));
        let asked = is_unwanted.clone();
        let result = unless(
            move || asked.get(),
            || {
                check();
                done.set(1);
                is_unwanted.set(true);
                check();
                done.set(2);
            },
        );
        assert_eq!((result, done.get()), (None, 1));
        check();
        assert_eq!(unless(|| false, || 3), Some(3));
    }

    #[test]
    fn a_panic_of_the_work_stays_a_panic() {
        let panic = catch_unwind(|| unless(|| false, || panic!("a bug"))).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"a bug"));
    }
}
