//! Finds errors of NVMe in the guest's kernel log.

/// The separator of the log's lines.
const SEPARATOR: char = '|';
/// Lines about NVMe of this level or a more severe one are errors. Level 0, an emergency, is the
/// most severe.
const WARNING: u32 = 4;
/// The end of the warning that the driver logs when a user asks for a reset. The warnings of the
/// driver's own resets are longer.
const ORDERED_RESET: &str = ": resetting controller";

/// The number of lines.
pub(crate) fn lines(said: &str) -> usize {
    said.split(SEPARATOR).filter(|line| !line.trim().is_empty()).count()
}

/// The lines that are errors. Each line begins with its level: `<4>[    1.234567] nvme nvme0:
/// text`.
pub(crate) fn faults(said: &str) -> Vec<String> {
    said.split(SEPARATOR).map(str::trim).filter(|line| is_fault(line)).map(str::to_owned).collect()
}

fn is_fault(line: &str) -> bool {
    let level = line
        .strip_prefix('<')
        .and_then(|rest| rest.split_once('>'))
        .and_then(|(level, _)| level.parse().ok());
    // Errors that the block layer and the detector of hung tasks log.
    let bad = ["I/O error", "blocked for more than"];
    let about_nvme = line.contains("nvme") && level.is_none_or(|level: u32| level <= WARNING);
    (about_nvme && !line.ends_with(ORDERED_RESET)) || bad.iter().any(|words| line.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn information_is_no_fault_and_a_warning_about_nvme_is() {
        let said = "<6>[    1.0] nvme nvme0: pci function 0000:01:00.0|<6>[ 1.1] nvme nvme0: 1/0/1 \
                    default/read/poll queues|<4>[ 2.0] kvm: no hardware support|";
        assert_eq!(lines(said), 3);
        assert!(faults(said).is_empty(), "{:?}", faults(said));
        assert_eq!(faults("<4>[ 3.0] nvme nvme0: missing or invalid SUBNQN field.|").len(), 1);
        assert!(faults("<4>[ 3.0] nvme nvme0: resetting controller|").is_empty());
        assert_eq!(faults("<4>[ 3.0] nvme nvme0: I/O 1 QID 2 timeout, reset controller|").len(), 1);
        assert_eq!(
            faults("<3>[ 3.0] nvme nvme0: Device not ready; aborting reset, CSTS=0x0").len(),
            1
        );
    }

    #[test]
    fn errors_and_timeouts_are_faults_under_any_name() {
        assert_eq!(faults("<3>[ 4.0] I/O error, dev nvme0n1, sector 8 op 0x0:(READ)").len(), 1);
        assert_eq!(
            faults("<4>[ 5.0] nvme nvme0: I/O 17 QID 2 timeout, completion polled").len(),
            1
        );
        assert_eq!(
            faults("<3>[ 6.0] INFO: task fio:99 blocked for more than 120 seconds.").len(),
            1
        );
        assert!(faults("<6>[ 6.0] nvme nvme0: Shutdown timeout set to 10 seconds").is_empty());
        assert!(faults("").is_empty());
    }
}
