//! The processes that train together: who started them, and what only the first of all, or of a node, does.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use super::inputs::data_failure;
use super::prepare::Prepared;
use super::resume::Resumed;
use crate::config::LoggingConfig;
use crate::data::dataset::Dataset;
use crate::device::{DeviceName, num_cuda_gpus};
use crate::recipe::Recipe;
use crate::schema::Problem;
use crate::train::ranks::launcher::Launched;
use crate::train::ranks::same::require_same;
use crate::train::ranks::{Alone, FIRST_REPORTS, Ranks, host};
use crate::util::failure::Failure;
use crate::util::files::hex;
use crate::util::stats::as_f64;

/// This process among those of its run.
#[derive(Clone, Debug)]
pub(super) struct RankPlace {
    /// Number of this process, from 0: the first writes the run's folder.
    pub(super) rank: usize,
    /// Number of processes.
    pub(super) size: usize,
    /// Number of this process on its node, from 0.
    local_rank: usize,
    /// Number of processes on its node.
    local_size: usize,
    /// Name and version of the library between them; empty where there is one.
    pub(super) library: String,
}

/// A sum of gradients over the ranks, as it was measured.
pub(super) struct MeasuredSum {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    /// Of the network that carried them.
    pub(super) interface: Option<String>,
}

/// Bytes that each network interface of this process has sent since the machine started.
pub(super) fn sent_bytes() -> Vec<(String, u64)> {
    of_interfaces(&std::fs::read_to_string("/proc/net/dev").unwrap_or_default())
}

fn of_interfaces(text: &str) -> Vec<(String, u64)> {
    let of = |line: &str| {
        let (name, counts) = line.split_once(':')?;
        Some((name.trim().to_owned(), counts.split_whitespace().nth(8)?.parse().ok()?))
    };
    text.lines().filter_map(of).collect()
}

/// The interface that has sent most since `before`, where that is at least so much.
pub(super) fn busiest(before: &[(String, u64)], now: Vec<(String, u64)>, least: u64) -> Option<String> {
    let sent = now.into_iter().filter_map(|(name, bytes)| {
        let (_, then) = before.iter().find(|(of, _)| *of == name)?;
        Some((bytes.saturating_sub(*then), name))
    });
    sent.max().filter(|(bytes, _)| *bytes >= least).map(|(_, name)| name)
}

/// From one sign of life to the next of a rank that others wait for.
const PULSE: Duration = Duration::from_secs(1);

/// What became of work that other ranks wait for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WorkState {
    Working,
    Done,
    Failed,
}

/// The ranks of a run, before it trains.
pub(super) struct Joined {
    pub(super) place: RankPlace,
    pub(super) ranks: Box<dyn Ranks>,
}

/// Whether no launcher has started this process together with others.
pub(super) fn is_alone() -> bool {
    Launched::find(|name| std::env::var(name).ok()).is_ok_and(|launched| launched.is_none())
}

impl Joined {
    /// Connects to the processes that the launcher started together with this one.
    ///
    /// # Errors
    /// A launcher that does not connect them, or no library that does.
    pub(super) fn join() -> Result<Self, Failure> {
        let launched = Launched::find(|name| std::env::var(name).ok()).map_err(Failure::input)?;
        let Some(Launched { local_rank, local_size, .. }) = launched else {
            let place = RankPlace { rank: 0, size: 1, local_rank: 0, local_size: 1, library: String::new() };
            return Ok(Self { place, ranks: Box::new(Alone) });
        };
        #[cfg(unix)]
        {
            let launched = launched.unwrap_or_else(|| unreachable!("it was found"));
            let mpi = crate::train::ranks::Mpi::start(&launched).map_err(|error| {
                // The launcher ends the others once the first has reported what all find.
                std::thread::sleep(FIRST_REPORTS * u32::from(launched.rank > 0));
                Failure::input(error)
            })?;
            let (rank, size, library) = (mpi.rank(), mpi.size(), mpi.version());
            let place = RankPlace { rank, size, local_rank, local_size, library };
            Ok(Self { place, ranks: Box::new(mpi) })
        }
        #[cfg(not(unix))]
        Err(Failure::input("several ranks need Linux or macOS"))
    }

    /// What leaves files for the other ranks of a node, which do it once the first has; they hear meanwhile that it is still at it.
    pub(super) fn first_of_node<T>(&mut self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        if self.place.local_rank > 0 {
            self.meet(|_| WorkState::Done);
            return work();
        }
        // Where the library takes calls of one thread only, they hear of the end alone.
        if !self.ranks.sum_beside(true) {
            let done = work()?;
            self.meet(|_| WorkState::Done);
            return Ok(done);
        }
        let (end, is_done) = mpsc::channel();
        std::thread::scope(|scope| {
            let state = move |pulse| match is_done.recv_timeout(pulse) {
                Ok(()) => WorkState::Done,
                Err(RecvTimeoutError::Timeout) => WorkState::Working,
                Err(RecvTimeoutError::Disconnected) => WorkState::Failed,
            };
            scope.spawn(|| self.meet(state));
            let end = end;
            let done = work()?;
            let _ = end.send(());
            Ok(done)
        })
    }

    /// Waits until all ranks are here, however long one works whose sign of life comes. `state_after` at most so long: of the work of
    /// this one.
    fn meet(&mut self, state_after: impl Fn(Duration) -> WorkState) {
        let mut state = WorkState::Working;
        loop {
            if state == WorkState::Working {
                state = state_after(PULSE);
            }
            self.ranks.wait_long();
            // Who has failed ends the others.
            if state == WorkState::Failed || !self.ranks.agree(state == WorkState::Working) {
                return;
            }
        }
    }

    /// Checks that all ranks have the same inputs.
    ///
    /// # Errors
    /// An input that differs, with the ranks that have it so.
    pub(super) fn compare(
        &mut self,
        recipe: &str,
        prepared: &Prepared,
        data: &Dataset,
        resumed: Option<&Resumed>,
    ) -> Result<Vec<String>, Failure> {
        if self.place.size == 1 {
            return Ok(Vec::new());
        }
        let of = |text: &str| hex(&Sha256::digest(text));
        let size = std::env::current_exe().and_then(std::fs::metadata).map_or(0, |metadata| metadata.len());
        let program = (env!("CARGO_PKG_VERSION"), option_env!("LORA_TRAIN_GIT_COMMIT"), size);
        let step = resumed.map_or(0, |resumed| resumed.state.step);
        let facts = [
            ("programs", of(&format!("{program:?}"))),
            ("recipes", of(recipe)),
            ("kinds of devices", of(prepared.device.kind.name())),
            ("models", prepared.source.weights.digest().map_or_else(String::new, |digest| hex(&digest))),
            ("tokenizers", hex(&data.tokenizer().digest())),
            ("rows", hex(&data.train_digest().map_err(data_failure)?)),
            ("checkpoints", format!("{step:x}")),
            ("MPI libraries", of(&format!("{} {}", self.place.library, self.ranks.sum_beside(true)))),
        ];
        self.ranks.wait_long();
        let hosts = require_same(&mut *self.ranks, &host(), &facts).map_err(Failure::input)?;
        self.ranks.name_hosts(&hosts);
        Ok(hosts)
    }
}

impl RankPlace {
    /// Whether this process writes the run's folder and speaks to people.
    pub(super) fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Whether it is the first of its node.
    pub(super) fn is_first_of_node(&self) -> bool {
        self.local_rank == 0
    }

    /// The recipe as this rank follows it: each has a GPU of its own, and only the first keeps figures.
    ///
    /// # Errors
    /// A device that is one for all ranks of a node.
    pub(super) fn recipe(&self, mut recipe: Recipe) -> Result<Recipe, Failure> {
        if self.size == 1 {
            return Ok(recipe);
        }
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let visible = visible.map(|devices| devices.split(',').filter(|device| !device.trim().is_empty()).count());
        recipe.device.name = self.device(&recipe.device.name, visible)?;
        if !self.is_first() {
            recipe.logging = LoggingConfig { tensorboard: false, ..LoggingConfig::default() };
        }
        Ok(recipe)
    }

    /// The device of this rank; `visible`: number of GPUs that the launcher leaves to it.
    fn device(&self, name: &str, visible: Option<usize>) -> Result<String, Problem> {
        let number = if visible == Some(1) { 0 } else { self.local_rank };
        match name.parse() {
            Ok(DeviceName::Cuda(ordinal)) if name.contains(':') && self.local_size > 1 => {
                let Self { local_size, .. } = self;
                let what =
                    format!("`device.name` = {name:?}: that is GPU {ordinal} for all {local_size} ranks of this node");
                Err(Problem::new(what).hint("\"cuda\" gives each rank a GPU of its own"))
            }
            Ok(DeviceName::Cuda(_)) if !name.contains(':') && number > 0 => Ok(format!("cuda:{number}")),
            // That GPU is opened later, after its kernels were compared.
            Ok(DeviceName::Auto) if (1..num_cuda_gpus() as usize).contains(&number) => Ok(format!("cuda:{number}")),
            _ => Ok(name.to_owned()),
        }
    }

    /// The ranks, for people: how many on which nodes, and how fast they exchange gradients; `between_gpus`: what does it there.
    pub(super) fn about(&self, hosts: &[String], between_gpus: Option<&str>, measured: &MeasuredSum) -> String {
        let mut nodes: Vec<(&str, usize)> = Vec::new();
        for host in hosts {
            match nodes.iter_mut().find(|(name, _)| name == host) {
                Some((_, count)) => *count += 1,
                None => nodes.push((host, 1)),
            }
        }
        let nodes = nodes.iter().map(|(name, count)| format!("{count} on {name}")).collect::<Vec<_>>().join(", ");
        let (size, library) = (self.size, &self.library);
        let by = between_gpus.map(|name| format!(" by {name}")).unwrap_or_default();
        let share = as_f64(size - 1) / as_f64(size);
        let MeasuredSum { bytes, seconds, interface } = measured;
        let (bytes, rate) = (as_f64(*bytes), 2.0 * share * 8e-9 / seconds);
        let over = interface.as_ref().map(|name| format!(" over {name}")).unwrap_or_default();
        format!(
            "ranks: {size} ({nodes}) by {library}; the gradients, {:.1} MB, are summed{by} in {:.1} ms ({:.2} Gbit/s each way{over})",
            bytes / 1e6,
            1e3 * seconds,
            bytes * rate
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_of_a_node_takes_a_gpu_of_its_own() {
        let place = |local_rank| RankPlace { rank: 5, size: 8, local_rank, local_size: 4, library: String::new() };
        assert_eq!(place(0).device("cuda", None).unwrap(), "cuda");
        assert_eq!(place(3).device("cuda", Some(4)).unwrap(), "cuda:3");
        // SLURM may show each task its own GPU alone.
        assert_eq!(place(3).device("cuda", Some(1)).unwrap(), "cuda");
        assert_eq!(place(3).device("cpu", None).unwrap(), "cpu");
        let error = place(1).device("cuda:2", None).unwrap_err().to_string();
        assert!(error.contains("GPU 2 for all 4 ranks"), "{error}");
        let alone = RankPlace { local_size: 1, local_rank: 0, ..place(0) };
        assert_eq!(alone.device("cuda:2", None).unwrap(), "cuda:2");
    }

    #[test]
    fn ranks_are_counted_by_node() {
        let place = RankPlace { rank: 0, size: 3, local_rank: 0, local_size: 2, library: "Open MPI v4.1.4".into() };
        let measured = |interface| MeasuredSum { bytes: 30_000_000, seconds: 0.5, interface };
        let text = |interface| place.about(&["a".into(), "a".into(), "b".into()], None, &measured(interface));
        let expected = "ranks: 3 (2 on a, 1 on b) by Open MPI v4.1.4; the gradients, 30.0 MB, are summed in 500.0 ms (0.64 Gbit/s \
                        each way";
        assert_eq!(text(None), format!("{expected})"));
        assert_eq!(text(Some("eth0".into())), format!("{expected} over eth0)"));
    }

    #[test]
    fn the_interface_that_carries_gradients_is_the_one_that_sends_most() {
        let dev = |eth0: u64, ib0: u64| {
            let head = "Inter-|   Receive\n face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n";
            of_interfaces(&format!(
                "{head}    lo:  9 1 0 0 0 0 0 0  9 1 0 0 0 0 0 0\n  eth0: 5 1 0 0 0 0 0 0 {eth0} 7 0 0 0 0 0 0\n   ib0:5 1 0 0 0 0 0 0 {ib0} 7 0 0 0 0 0 0\n"
            ))
        };
        let busiest = |eth0, ib0| busiest(&dev(1000, 500), dev(eth0, ib0), 100);
        assert_eq!(busiest(1100, 505).as_deref(), Some("eth0"));
        assert_eq!(busiest(1100, 2000).as_deref(), Some("ib0"));
        assert_eq!(busiest(1099, 500), None);
    }
}
