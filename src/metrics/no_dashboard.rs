//! Stands in for the dashboard in a binary that was built without it.

use burn_train::Interrupter;

use super::{EvalMetrics, StepMetrics};

pub(super) enum Dashboard {}

impl Dashboard {
    pub(super) fn open(_: Interrupter, _: u64, _: u64, _: &str) -> Result<Self, String> {
        Err("this binary was built without it; build it with `--features tui`".into())
    }

    pub(super) fn start(&self) {
        match *self {}
    }

    pub(super) fn step(&self, _: &StepMetrics) {
        match *self {}
    }

    pub(super) fn evaluating(&self, _: usize, _: usize) {
        match *self {}
    }

    pub(super) fn eval(&self, _: &EvalMetrics) {
        match *self {}
    }

    pub(super) fn warning(&self, _: &str) {
        match *self {}
    }

    pub(super) fn finding(&self, _: &str) {
        match *self {}
    }
}
