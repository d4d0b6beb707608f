//! Sub-commands other than training, one file each.

pub mod bench;
pub mod check;
pub mod compare;
pub mod doctor;
pub mod generate;
pub mod inspect;
pub mod merge;
pub mod plan;
pub mod report;
pub mod tune;
