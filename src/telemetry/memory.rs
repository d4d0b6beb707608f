//! Memory that is left, and what of this process was swapped out.

use std::path::{Path, PathBuf};

/// Where control groups of version 2 are shown.
const CGROUPS: &str = "/sys/fs/cgroup";

/// The control group of this process, where it limits memory.
#[derive(Debug)]
pub(super) struct MemoryGroup {
    folder: PathBuf,
    limit_bytes: u64,
}

impl MemoryGroup {
    /// `None` where there is no limit.
    pub(super) fn of_this_process() -> Option<Self> {
        let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
        // A container sees its own group as the root.
        let own = Path::new(CGROUPS).join(path.trim_start_matches('/'));
        [own.as_path(), Path::new(CGROUPS)].into_iter().find_map(Self::open)
    }

    fn open(folder: &Path) -> Option<Self> {
        Some(Self { limit_bytes: number(&folder.join("memory.max"))?, folder: folder.to_owned() })
    }

    /// What is left of the limit; pages of files that were not used for long count as left.
    fn available_bytes(&self) -> Option<u64> {
        let used = number(&self.folder.join("memory.current"))?;
        let stat = std::fs::read_to_string(self.folder.join("memory.stat")).unwrap_or_default();
        let reclaimable = field(&stat, "inactive_file ").unwrap_or(0);
        Some(self.limit_bytes.saturating_sub(used.saturating_sub(reclaimable)))
    }
}

/// Memory that this process may still take without anything being swapped out.
pub(super) fn available_bytes(group: Option<&MemoryGroup>) -> Option<u64> {
    let machine = available_on_machine();
    let of_group = group.and_then(MemoryGroup::available_bytes);
    [machine, of_group].into_iter().flatten().min()
}

#[cfg(target_os = "linux")]
fn available_on_machine() -> Option<u64> {
    kib(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

#[cfg(not(target_os = "linux"))]
fn available_on_machine() -> Option<u64> {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    Some(system.available_memory()).filter(|bytes| *bytes > 0)
}

/// Memory of this process that was swapped out.
pub(super) fn swapped_bytes() -> Option<u64> {
    kib(&std::fs::read_to_string("/proc/self/status").ok()?, "VmSwap:")
}

/// `Name:   12 kB`, in bytes.
fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// `name 12`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok()
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_group_has_left_is_its_limit_without_what_cannot_be_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        assert!(MemoryGroup::open(folder.path()).is_none());
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        write("memory.stat", "anon 300\ninactive_file 250\nactive_file 100\n");
        let group = MemoryGroup::open(folder.path()).unwrap();
        assert_eq!(group.available_bytes(), Some(550));
        assert_eq!(available_bytes(Some(&group)), Some(550), "less than the machine has");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_machine_has_memory_left_and_lines_of_proc_are_kibibytes() {
        assert!(available_bytes(None).unwrap() > 1 << 20);
        assert!(swapped_bytes().is_some());
        assert_eq!(kib("A:  1 kB\nVmSwap:\t   12 kB\n", "VmSwap:"), Some(12 * 1024));
        assert_eq!(kib("VmSwap: 12\n", "VmSwap:"), None);
    }
}
