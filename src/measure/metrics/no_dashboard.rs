//! Stands in for the dashboard in a binary that was built without it.

use std::convert::Infallible;

use burn_train::Interrupter;

use super::pace::Pace;
use super::{EvalMetrics, Sample, StepMetrics};

pub(super) struct Dashboard(Infallible);

impl Dashboard {
    pub(super) fn open(_: Interrupter, _: [u64; 2], _: Pace, _: &str) -> Result<Self, String> {
        Err("this binary was built without it; build it with `--features tui`".into())
    }

    pub(super) fn start(&self) {
        match self.0 {}
    }

    pub(super) fn step(&self, _: &StepMetrics) {
        match self.0 {}
    }

    pub(super) fn at_work(&self, _: String) {
        match self.0 {}
    }

    pub(super) fn evaluated(&self, _: u64, _: f64) {
        match self.0 {}
    }

    pub(super) fn eval(&self, _: &EvalMetrics) {
        match self.0 {}
    }

    pub(super) fn sample(&self, _: &Sample) {
        match self.0 {}
    }

    pub(super) fn warning(&self, _: &str) {
        match self.0 {}
    }

    pub(super) fn finding(&self, _: &str) {
        match self.0 {}
    }
}
