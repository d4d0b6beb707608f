//! Memory of this process and of the machine, within the limits of control groups.

use std::path::{Path, PathBuf};

use sysinfo::{Process, ProcessRefreshKind, ProcessesToUpdate, System};

/// Where control groups are shown.
const CGROUPS: &str = "/sys/fs/cgroup";

/// The most memory of this process that has been in RAM since it started.
#[must_use]
pub fn peak_host_memory_bytes() -> Option<u64> {
    // The peak that `getrusage` gives on Linux can be that of the program before this one in the same process.
    if cfg!(target_os = "linux") { own_status_bytes("VmHWM:") } else { super::usage::usage()?.peak_resident_bytes }
}

/// Memory of this machine, or the limit of this process's control groups if that is lower.
#[must_use]
pub fn total_host_memory_bytes() -> Option<u64> {
    let limit = MemoryGroups::of_this_process().limit_bytes().unwrap_or(u64::MAX);
    Some(machine().total_memory().min(limit)).filter(|bytes| *bytes > 0)
}

/// Memory that this process can still take: what is free on this machine or in its control group, the page cache
/// counted as free. A limit of address space (`ulimit -v`) lowers it.
#[must_use]
pub fn available_host_memory_bytes() -> Option<u64> {
    let available = available_bytes(&MemoryGroups::of_this_process())?;
    Some(available.min(free_address_space_bytes())).filter(|bytes| *bytes > 0)
}

/// What `ulimit -v` leaves; everything if there is no limit.
#[cfg(target_os = "linux")]
fn free_address_space_bytes() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` outlives the call, which fills it or leaves it.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    if asked != 0 || limit.rlim_cur == libc::RLIM_INFINITY {
        return u64::MAX;
    }
    limit.rlim_cur.saturating_sub(own_status_bytes("VmSize:").unwrap_or(0))
}

#[cfg(not(target_os = "linux"))]
fn free_address_space_bytes() -> u64 {
    u64::MAX
}

/// Memory of this process that is in RAM now.
pub(super) fn resident_bytes() -> Option<u64> {
    if cfg!(target_os = "linux") {
        // sysinfo reads four files for it.
        return own_status_bytes("VmRSS:");
    }
    let (pid, mut system) = (sysinfo::get_current_pid().ok()?, System::new());
    let kind = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), true, kind);
    system.process(pid).map(Process::memory)
}

/// Memory that this process may still take without swapping.
pub(super) fn available_bytes(groups: &MemoryGroups) -> Option<u64> {
    let on_machine = Some(machine().available_memory()).filter(|bytes| *bytes > 0);
    let of_groups = groups.0.iter().filter_map(MemoryGroup::available_bytes).min();
    [on_machine, of_groups].into_iter().flatten().min()
}

/// Memory of this process that was swapped out.
pub(super) fn swapped_bytes() -> Option<u64> {
    own_status_bytes("VmSwap:")
}

fn machine() -> System {
    let mut system = System::new();
    system.refresh_memory();
    system
}

/// A size from `/proc/self/status`, such as `VmSwap:   12 kB`, in bytes.
fn own_status_bytes(name: &str) -> Option<u64> {
    kib(&std::fs::read_to_string("/proc/self/status").ok()?, name)
}

fn kib(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// This process's control groups that limit memory: its own and those around it.
#[derive(Debug, Default)]
pub(super) struct MemoryGroups(Vec<MemoryGroup>);

#[derive(Debug)]
struct MemoryGroup {
    folder: PathBuf,
    names: &'static Names,
    limit_bytes: u64,
}

/// File names of one version of control groups.
#[derive(Debug)]
struct Names {
    limit: &'static str,
    used: &'static str,
    /// Fields of `memory.stat` that count pages of files, which can be dropped.
    files: [&'static str; 2],
}

const VERSION_1: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    files: ["total_inactive_file ", "total_active_file "],
};
const VERSION_2: Names =
    Names { limit: "memory.max", used: "memory.current", files: ["inactive_file ", "active_file "] };

impl MemoryGroups {
    pub(super) fn of_this_process() -> Self {
        Self::of(&std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default(), Path::new(CGROUPS))
    }

    /// The groups that `/proc/self/cgroup` names, below `root`.
    fn of(cgroup: &str, root: &Path) -> Self {
        let mut groups = Vec::new();
        for line in cgroup.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            let (root, names) = match controllers {
                "" => (root.to_owned(), &VERSION_2),
                _ if controllers.split(',').any(|name| name == "memory") => (root.join("memory"), &VERSION_1),
                _ => continue,
            };
            // A container sees its own group as the root, whatever the path says.
            let own = root.join(path.trim_start_matches('/'));
            let folders = own.ancestors().take_while(|folder| folder.starts_with(&root));
            groups.extend(folders.filter_map(|folder| MemoryGroup::open(folder, names)));
        }
        Self(groups)
    }

    /// The lowest limit; `None` if no group has one.
    fn limit_bytes(&self) -> Option<u64> {
        self.0.iter().map(|group| group.limit_bytes).min()
    }
}

impl MemoryGroup {
    fn open(folder: &Path, names: &'static Names) -> Option<Self> {
        Some(Self { limit_bytes: number(&folder.join(names.limit))?, folder: folder.to_owned(), names })
    }

    /// What is left of the limit; pages of files count as left.
    fn available_bytes(&self) -> Option<u64> {
        let used = number(&self.folder.join(self.names.used))?;
        let stat = std::fs::read_to_string(self.folder.join("memory.stat")).unwrap_or_default();
        let field = |name| stat.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<u64>().ok();
        let files: u64 = self.names.files.into_iter().filter_map(field).sum();
        Some(self.limit_bytes.saturating_sub(used.saturating_sub(files)))
    }
}

pub(super) fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_group_has_left_is_its_limit_without_what_cannot_be_dropped() {
        let root = tempfile::tempdir().unwrap();
        let write = |folder: &str, name: &str, text: &str| {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
            std::fs::write(root.path().join(folder).join(name), text).unwrap();
        };
        let groups = |cgroup: &str| MemoryGroups::of(cgroup, root.path());
        write("job/step", "memory.max", "max\n");
        assert_eq!(groups("0::/job/step\n").limit_bytes(), None);
        write("job/step", "memory.max", "1000\n");
        write("job/step", "memory.current", "700\n");
        write("job/step", "memory.stat", "anon 300\ninactive_file 250\nactive_file 100\n");
        assert_eq!(available_bytes(&groups("0::/job/step\n")), Some(650), "the page cache is not in use");
        // The group around it has less left.
        write("job", "memory.max", "2000\n");
        write("job", "memory.current", "1900\n");
        assert_eq!(available_bytes(&groups("0::/job/step\n")), Some(100));
        assert_eq!(groups("0::/job/step\n").limit_bytes(), Some(1000));
        assert_eq!(groups("0::/job\n").limit_bytes(), Some(2000));

        // The first version of control groups.
        write("memory/docker/a", "memory.limit_in_bytes", "1000\n");
        write("memory/docker/a", "memory.usage_in_bytes", "900\n");
        let stat = "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 100\n";
        write("memory/docker/a", "memory.stat", stat);
        let groups = groups("5:cpu,cpuacct:/docker/a\n4:devices,memory:/docker/a\n0::/\n");
        assert_eq!((groups.limit_bytes(), available_bytes(&groups)), (Some(1000), Some(400)));
    }

    #[test]
    fn the_machine_has_memory_left_and_what_a_process_touches_stays_in_its_peak() {
        assert!(available_bytes(&MemoryGroups::default()).unwrap() > 1 << 20);
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        assert!(resident_bytes().unwrap() >= 64 << 20);
        drop(block);
        assert!(peak_host_memory_bytes().unwrap() >= 64 << 20);
        assert_eq!(kib("A:  1 kB\nVmSwap:\t   12 kB\n", "VmSwap:"), Some(12 * 1024));
        assert_eq!(kib("VmSwap: 12\n", "VmSwap:"), None);
    }
}
