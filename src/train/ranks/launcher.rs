//! What started this process, as the environment tells it.

use super::RanksError;

/// The binary interfaces of MPI libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Open MPI's.
    OpenMpi,
    /// MPICH's, which is also that of Intel MPI, MVAPICH and Cray MPICH.
    Mpich,
}

/// MPICH's own launcher.
pub const HYDRA: &str = "MPICH's mpirun";

/// One of several processes that a launcher started together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// Name of the launcher, for people.
    pub launcher: &'static str,
    /// The library that it connects.
    pub family: Family,
    /// Number of this process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// Number of this process on its node, from 0.
    pub local_rank: usize,
    /// Number of processes on this node.
    pub local_size: usize,
}

impl Launched {
    /// What started this process; `None` for a process that was started alone. `variable` reads the environment.
    ///
    /// # Errors
    /// A launcher that does not connect processes by MPI.
    pub fn find(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, RanksError> {
        let number = |name: &str| variable(name)?.trim().parse::<usize>().ok();
        let is_set = |name: &str| variable(name).is_some();
        let of = |launcher, family, [rank, size, local_rank, local_size]: [&str; 4]| {
            let (rank, size) = (number(rank)?, number(size)?);
            let (local_rank, local_size) = (number(local_rank).unwrap_or(0), number(local_size).unwrap_or(1));
            Some(Self { launcher, family, rank, size, local_rank, local_size })
        };
        let open_mpi = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"].map(|name| format!("OMPI_COMM_WORLD_{name}"));
        let open_mpi = of("Open MPI's mpirun", Family::OpenMpi, open_mpi.each_ref().map(String::as_str));
        let step = number("SLURM_STEP_NUM_TASKS").filter(|_| is_set("SLURM_STEP_ID"));
        let found = if let Some(found) = open_mpi {
            found
        } else if let Some(size) = step {
            // `pmix` is what Open MPI understands, `pmi2` what MPICH does.
            let family = match (is_set("PMIX_RANK"), is_set("PMI_RANK") || is_set("PMI_FD")) {
                (true, _) => Family::OpenMpi,
                (false, true) => Family::Mpich,
                (false, false) if size > 1 => return Err(no_plugin(size)),
                (false, false) => return Ok(None),
            };
            let local_size = variable("SLURM_STEP_TASKS_PER_NODE").or_else(|| variable("SLURM_TASKS_PER_NODE"));
            let local_size = local_size.and_then(|tasks| tasks_of_node(&tasks, number("SLURM_NODEID").unwrap_or(0)));
            let (rank, local_rank) = (number("SLURM_PROCID").unwrap_or(0), number("SLURM_LOCALID").unwrap_or(0));
            Self { launcher: "srun", family, rank, size, local_rank, local_size: local_size.unwrap_or(1) }
        } else {
            let names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
            match of(HYDRA, Family::Mpich, names) {
                Some(found) => found,
                None if is_set("TORCHELASTIC_RUN_ID") || (is_set("LOCAL_WORLD_SIZE") && is_set("WORLD_SIZE")) => {
                    return Err(torchrun());
                }
                None => return Ok(None),
            }
        };
        Ok((found.size > 1).then_some(found))
    }
}

/// Tasks of the node with this index, of a list such as `4(x2),1`.
fn tasks_of_node(tasks: &str, node: usize) -> Option<usize> {
    let of_each = tasks.split(',').flat_map(|entry| {
        let (count, times) = entry.trim().trim_end_matches(')').split_once("(x").unwrap_or((entry.trim(), "1"));
        std::iter::repeat_n(count.parse().ok(), times.parse().unwrap_or(1))
    });
    of_each.into_iter().nth(node)?
}

fn no_plugin(size: usize) -> RanksError {
    RanksError::Launcher(format!(
        "srun started {size} tasks and connects none of them\n  hint: `srun --mpi=pmix` with Open MPI, `srun --mpi=pmi2` with \
         MPICH; `srun --mpi=list` shows what this SLURM has"
    ))
}

fn torchrun() -> RanksError {
    RanksError::Launcher(
        "torchrun connects its processes by a store of PyTorch's, which this program does not speak\n  hint: start it with \
         `mpirun -n N lora-train RECIPE.toml`, or `srun --mpi=pmix lora-train RECIPE.toml`"
            .to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(variables: &[(&str, &str)]) -> Result<Option<Launched>, RanksError> {
        let value = |name: &str| variables.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).to_owned());
        Launched::find(value)
    }

    fn numbers(found: &Launched) -> [usize; 4] {
        [found.rank, found.size, found.local_rank, found.local_size]
    }

    #[test]
    fn launchers_are_known_by_their_variables() {
        assert!(find(&[]).unwrap().is_none());
        let mut open_mpi = vec![
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        let found = find(&open_mpi).unwrap().unwrap();
        assert_eq!((found.family, numbers(&found)), (Family::OpenMpi, [3, 4, 1, 2]));
        // mpirun within SLURM starts its daemons by srun.
        open_mpi.extend([("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1")]);
        assert_eq!(find(&open_mpi).unwrap().unwrap(), found);
        open_mpi[1].1 = "1";
        assert!(find(&open_mpi).unwrap().is_none(), "one rank needs no library");

        let mpich = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
        let found = find(&mpich).unwrap().unwrap();
        assert_eq!((found.family, numbers(&found)), (Family::Mpich, [1, 2, 1, 2]));
    }

    #[test]
    fn only_a_step_of_slurm_is_srun() {
        let script = [("SLURM_NTASKS", "2"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")];
        assert!(find(&script).unwrap().is_none());
        let mut step = vec![
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NUM_TASKS", "5"),
            ("SLURM_PROCID", "4"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NODEID", "2"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
        ];
        let error = find(&step).unwrap_err().to_string();
        assert!(error.contains("--mpi=pmix"), "{error}");
        step.push(("PMI_RANK", "4"));
        let found = find(&step).unwrap().unwrap();
        assert_eq!((found.family, numbers(&found)), (Family::Mpich, [4, 5, 0, 1]));
        step.push(("PMIX_RANK", "4"));
        assert_eq!(find(&step).unwrap().unwrap().family, Family::OpenMpi);
        assert_eq!([0, 1, 2, 3].map(|node| tasks_of_node("2(x2),1", node)), [Some(2), Some(2), Some(1), None]);
    }

    #[test]
    fn torchrun_is_refused_with_what_to_type() {
        let variables = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")];
        let error = find(&variables).unwrap_err().to_string();
        assert!(error.contains("mpirun -n N"), "{error}");
        // What users set by hand is no launcher.
        assert!(find(&[("RANK", "0"), ("WORLD_SIZE", "2")]).unwrap().is_none());
    }
}
