//! Memory that is left, and how much of this process is swapped out.

use std::path::{Path, PathBuf};

/// Where control groups are shown.
const CGROUPS: &str = "/sys/fs/cgroup";

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

/// This process's control groups that limit memory: its own and those around it.
#[derive(Debug, Default)]
pub(super) struct MemoryGroups(Vec<MemoryGroup>);

#[derive(Debug)]
struct MemoryGroup {
    folder: PathBuf,
    names: &'static Names,
    limit_bytes: u64,
}

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
    pub(super) fn limit_bytes(&self) -> Option<u64> {
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
        let files: u64 = self.names.files.iter().filter_map(|name| field(&stat, name)).sum();
        Some(self.limit_bytes.saturating_sub(used.saturating_sub(files)))
    }
}

/// Memory that this process may still take without swapping.
pub(super) fn available_bytes(groups: &MemoryGroups) -> Option<u64> {
    let of_groups = groups.0.iter().filter_map(MemoryGroup::available_bytes).min();
    [available_on_machine(), of_groups].into_iter().flatten().min()
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
    }

    #[test]
    fn groups_of_the_first_version_are_read_too() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("memory/docker/a");
        std::fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
        write("memory.limit_in_bytes", "1000\n");
        write("memory.usage_in_bytes", "900\n");
        write("memory.stat", "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 100\n");
        let groups = MemoryGroups::of("5:cpu,cpuacct:/docker/a\n4:devices,memory:/docker/a\n0::/\n", root.path());
        assert_eq!((groups.limit_bytes(), available_bytes(&groups)), (Some(1000), Some(400)));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_machine_has_memory_left_and_lines_of_proc_are_kibibytes() {
        assert!(available_bytes(&MemoryGroups::default()).unwrap() > 1 << 20);
        assert!(swapped_bytes().is_some());
        assert_eq!(kib("A:  1 kB\nVmSwap:\t   12 kB\n", "VmSwap:"), Some(12 * 1024));
        assert_eq!(kib("VmSwap: 12\n", "VmSwap:"), None);
    }
}
