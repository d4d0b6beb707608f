//! What the diagnosis says during a run and at its end.

use super::Trainer;
use crate::data::pipeline::RowCounts;
use crate::diagnosis::{Facts, Figures, Finding, Run, Watch, diagnose};
use crate::metrics::StepMetrics;

/// The figures that the diagnosis gathers since the last start.
#[derive(Debug)]
pub(super) struct Gathered {
    run: Run,
    watch: Watch,
    /// What has been told since the last start.
    pub(super) told: Vec<Finding>,
    has_first: bool,
    rows: RowCounts,
    pub(super) num_evaluations: u64,
    /// Those of them before the first step and after the last one.
    pub(super) num_edge_evaluations: u64,
    pub(super) num_checkpoints: u64,
}

impl Gathered {
    pub(super) fn new(facts: Facts) -> Self {
        Self {
            watch: Watch::new(facts.clone()),
            run: Run { facts, figures: Figures::default() },
            told: Vec::new(),
            has_first: false,
            rows: RowCounts::default(),
            num_evaluations: 0,
            num_edge_evaluations: 0,
            num_checkpoints: 0,
        }
    }
}

impl Trainer<'_> {
    /// Takes a step in. What has lasted is told, and marked in the step's line.
    pub(super) fn gather(&mut self, line: &mut StepMetrics, rows: RowCounts) -> Vec<Finding> {
        let gathered = &mut self.gathered;
        gathered.rows += rows;
        if !std::mem::replace(&mut gathered.has_first, true) {
            gathered.run.figures.add_first(line);
            return Vec::new();
        }
        if gathered.watch.is_slow(line) {
            line.findings.push("slow_step".into());
        }
        gathered.run.figures.add(line);
        let findings = gathered.watch.observe(line);
        line.findings.extend(findings.iter().map(|finding| finding.rule.clone()));
        gathered.told.extend_from_slice(&findings);
        findings
    }

    /// What held the steps of this start back, the worst first.
    pub(super) fn diagnosis(&self) -> Vec<Finding> {
        let Gathered { run, rows, num_evaluations, num_edge_evaluations, num_checkpoints, .. } = &self.gathered;
        let mut run = run.clone();
        run.figures.end(&self.time_of_start(), [*num_evaluations, *num_edge_evaluations], *num_checkpoints);
        run.figures.longest_row_tokens = (rows.longest_tokens > 0).then_some(rows.longest_tokens);
        diagnose(&run)
    }
}
