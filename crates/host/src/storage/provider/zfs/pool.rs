//! The health and the devices of pools, from `zpool list` and `zpool status`.
//!
//! Monitoring must not treat a missing answer as a healthy pool: an answer that is empty, truncated, or about another
//! pool is an error.
//!
//! Source: zpool-list(8), zpool-status(8); OpenZFS 2.1, zfs-fuse 0.7.0, which has no `-p` and prints sizes with three
//! digits.

use super::super::{ProviderError, ProviderResult};
use super::error_messages::refusal;
use super::{ZPOOL, Zfs, full_name};

/// A pool, with values as ZFS prints them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolState {
    /// The name.
    pub name: String,
    /// `ONLINE`, `DEGRADED`, `FAULTED` and the like.
    pub health: String,
    /// The size: `3.62T`. This and the following values are `-` for a pool that cannot be opened.
    pub size: String,
    /// Free space.
    pub free: String,
    /// Used space in percent: `45%`.
    pub capacity: String,
}

/// A device of a pool: a disk, or a group such as a mirror.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolDevice {
    /// The level below the pool: 1 for a mirror, 2 for a disk in it.
    pub depth: usize,
    /// The name.
    pub name: String,
    /// `ONLINE`, `UNAVAIL` and the like.
    pub state: String,
    /// Whether its error counters are non-zero.
    pub has_errors: DeviceErrors,
}

/// The kinds of errors that a device has had.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceErrors {
    /// Read errors.
    pub read: bool,
    /// Write errors.
    pub write: bool,
    /// Checksum errors.
    pub checksum: bool,
}

/// The space of a pool, including redundancy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolRoom {
    /// Total size.
    pub size_bytes: u64,
    /// Allocated space.
    pub allocated_bytes: u64,
    /// Free space.
    pub free_bytes: u64,
}

impl PoolState {
    /// Whether the pool is open, so that its values are valid.
    pub fn is_open(&self) -> bool {
        ["ONLINE", "DEGRADED"].contains(&&self.health[..])
    }
}

impl Zfs {
    fn ask_pool(&self, pool: &str, arguments: &[&str]) -> ProviderResult<String> {
        // The name becomes an argument.
        full_name(pool, "check")?;
        let arguments: Vec<&str> = arguments.iter().copied().chain([pool]).collect();
        let answer = self.tools.ask(ZPOOL, &arguments)?;
        if !answer.is_success {
            return Err(refusal("inspect", pool, &answer.stderr));
        }
        if !answer.output.ends_with('\n') {
            return Err(invalid(format!("its output about {pool} is empty or truncated")));
        }
        Ok(answer.output)
    }

    /// The state of a pool.
    pub fn pool(&self, pool: &str) -> ProviderResult<PoolState> {
        let answer = self.ask_pool(pool, &["list", "-H", "-o", "name,size,cap,health,free"])?;
        parse_pool(pool, &answer)
    }

    /// The devices of a pool, in order. The list may be incomplete if the pool is not open.
    pub fn pool_devices(&self, pool: &PoolState) -> ProviderResult<Vec<PoolDevice>> {
        let answer = self.ask_pool(&pool.name, &["status"])?;
        match parse_devices(&pool.name, &answer) {
            Err(ProviderError::Invalid { .. }) if !pool.is_open() => Ok(Vec::new()),
            devices => devices,
        }
    }

    /// The space of a pool. The values have only three digits if ZFS does not support `zpool list -p`.
    pub fn pool_room(&self, pool: &str) -> ProviderResult<PoolRoom> {
        let flags = if self.is_newer()? { "-Hp" } else { "-H" };
        let answer = self.ask_pool(pool, &["list", flags, "-o", "name,size,allocated,free"])?;
        parse_space(pool, &answer)
    }

    /// The used space of a pool in percent.
    pub fn used_percent(&self, pool: &str) -> ProviderResult<u8> {
        let answer = self.ask_pool(pool, &["list", "-H", "-o", "capacity"])?;
        let percent = answer.trim().trim_end_matches('%').parse();
        percent.map_err(|_| invalid(format!("the used percentage of {pool} is {answer:?}")))
    }
}

fn invalid(detail: String) -> ProviderError {
    ProviderError::Invalid { program: ZPOOL, detail }
}

/// The fields of the only line, which must be about `pool`.
fn fields<'a, const COUNT: usize>(pool: &str, answer: &'a str) -> ProviderResult<[&'a str; COUNT]> {
    let mut lines = answer.lines();
    let fields: Option<Vec<&str>> = lines.next().map(|line| line.split('\t').collect());
    let fields = fields.and_then(|fields| <[&str; COUNT]>::try_from(fields).ok());
    match fields {
        Some(fields) if fields[0] == pool && lines.next().is_none() => Ok(fields),
        _ => Err(invalid(format!("{answer:?} is not the line of {pool}"))),
    }
}

fn parse_pool(pool: &str, answer: &str) -> ProviderResult<PoolState> {
    let [name, size, capacity, health, free] = fields(pool, answer)?;
    let state = PoolState {
        name: name.to_owned(),
        health: health.to_owned(),
        size: size.to_owned(),
        free: free.to_owned(),
        capacity: capacity.to_owned(),
    };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_full_to = capacity.strip_suffix('%').is_some_and(is_number);
    let has_sizes = bytes_of(size).is_some() && bytes_of(free).is_some() && is_full_to;
    if !is_state(health) || (state.is_open() && !has_sizes) {
        return Err(invalid(format!("{answer:?} is not the line of {pool}")));
    }
    Ok(state)
}

fn parse_space(pool: &str, answer: &str) -> ProviderResult<PoolRoom> {
    let [_, size, allocated, free] = fields(pool, answer)?;
    let bytes = |text| bytes_of(text).ok_or_else(|| invalid(format!("{text:?} is not a size of {pool}")));
    Ok(PoolRoom {
        size_bytes: bytes(size)?,
        allocated_bytes: bytes(allocated)?,
        free_bytes: bytes(free)?,
    })
}

/// Parses a size as ZFS prints it: `1234`, `95.5M`, `1T`.
fn bytes_of(text: &str) -> Option<u64> {
    let (number, shift) = match text.char_indices().last()? {
        (_, '0'..='9') => (text, 0),
        (place, unit) => (&text[..place], 10 * "BKMGTPE".find(unit)?),
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| !text.is_empty() && text.len() <= 20 && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() > 3 {
        return None;
    }
    let thousandths = whole.parse::<u128>().ok()? * 1000 + format!("{part:0<3}").parse::<u128>().ok()?;
    u64::try_from(thousandths.checked_mul(1 << shift)? / 1000).ok()
}

/// Whether a word is the state of a pool or device.
fn is_state(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_uppercase())
}

fn parse_devices(pool: &str, answer: &str) -> ProviderResult<Vec<PoolDevice>> {
    let about = format!("pool: {pool}");
    let mut lines = answer.lines().skip_while(|line| line.trim() != about);
    let is_heading = |line: &&str| line.split_whitespace().eq(["NAME", "STATE", "READ", "WRITE", "CKSUM"]);
    if lines.find(is_heading).is_none() {
        return Err(invalid(format!("it does not list the devices of {pool}")));
    }
    let root: Vec<&str> = lines.next().unwrap_or_default().split_whitespace().collect();
    if root.len() < 5 || root[0] != pool || !is_state(root[1]) {
        return Err(invalid(format!("{root:?} is not the line of {pool}")));
    }
    let mut devices = Vec::new();
    for line in lines {
        if line.is_empty() {
            return Ok(devices);
        }
        devices.extend(parse_device(line)?);
    }
    // An empty line follows the last device.
    Err(invalid(format!("its list of the devices of {pool} is truncated")))
}

/// The device in a line; none for a heading, or for a spare, which has no counters.
fn parse_device(line: &str) -> ProviderResult<Option<PoolDevice>> {
    let nonsense = || invalid(format!("{line:?} is not the line of a device"));
    let inside = line.strip_prefix('\t').ok_or_else(nonsense)?;
    let depth = (inside.len() - inside.trim_start_matches(' ').len()) / 2;
    let fields_of_line: Vec<&str> = inside.split_whitespace().collect();
    if fields_of_line.len() < 5 {
        let is_spare = fields_of_line.get(1).copied().is_some_and(is_state);
        let is_heading = depth == 0 && fields_of_line.len() == 1;
        return if is_spare || is_heading {
            Ok(None)
        } else {
            Err(nonsense())
        };
    }
    // A device can be a file whose name contains spaces.
    let counted = |place: &usize| {
        is_state(fields_of_line[*place]) && fields_of_line[place + 1..place + 4].iter().all(|word| is_count(word))
    };
    let in_use = |place: &usize| fields_of_line[*place] == "INUSE";
    let place = (1..fields_of_line.len() - 3)
        .find(counted)
        .or_else(|| (1..fields_of_line.len()).find(in_use));
    let place = place.ok_or_else(nonsense)?;
    let has_errors = |offset: usize| {
        let word = fields_of_line.get(place + offset).filter(|word| is_count(word));
        word.is_some_and(|word| word.bytes().any(|byte| (b'1'..=b'9').contains(&byte)))
    };
    Ok(Some(PoolDevice {
        depth,
        name: fields_of_line[..place].join(" "),
        state: fields_of_line[place].to_owned(),
        has_errors: DeviceErrors {
            read: has_errors(1),
            write: has_errors(2),
            checksum: has_errors(3),
        },
    }))
}

fn is_count(word: &str) -> bool {
    word == "-" || bytes_of(word).is_some()
}

#[cfg(test)]
mod tests {
    use super::{PoolDevice, bytes_of, parse_devices, parse_pool, parse_space};

    const STATUS: &str = "  pool: tank\n state: DEGRADED\nstatus: One or more devices are faulted\n\tin response to errors.\n\
        config:\n\n\tNAME                STATE     READ WRITE CKSUM\n\ttank                DEGRADED     0     0     0\n\
        \t  raidz1-0          DEGRADED     0     0     0\n\t    sda             ONLINE       0     0     0\n\
        \t    my disk         FAULTED     12 1.2K     0  too many errors\n\t    spare-2         DEGRADED     0     0     0\n\
        \t      sdc           UNAVAIL      0     0     3  was /dev/sdc1\n\t      sdd           INUSE     currently in use\n\
        \tlogs\t\n\t  sde               ONLINE       0     0     0\n\tspares\n\t  sdd               INUSE     currently in use\n\
        \t  sdf               AVAIL   \n\t  sdg               UNAVAIL   cannot open\n\nerrors: No known data errors\n";

    fn summary(device: &PoolDevice) -> String {
        let errors = device.has_errors;
        let errors = [errors.read, errors.write, errors.checksum].map(u8::from);
        format!("{} {} {} {errors:?}", device.depth, device.name, device.state)
    }

    #[test]
    fn devices_of_a_pool_are_listed_with_their_errors() {
        let devices = parse_devices("tank", STATUS).unwrap();
        let summary: Vec<String> = devices.iter().map(summary).collect();
        assert_eq!(
            summary,
            [
                "1 raidz1-0 DEGRADED [0, 0, 0]",
                "2 sda ONLINE [0, 0, 0]",
                "2 my disk FAULTED [1, 1, 0]",
                "2 spare-2 DEGRADED [0, 0, 0]",
                "3 sdc UNAVAIL [0, 0, 1]",
                "3 sdd INUSE [0, 0, 0]",
                "1 sde ONLINE [0, 0, 0]",
                "1 sdd INUSE [0, 0, 0]",
            ]
        );
    }

    /// A truncated answer must not hide a failed disk.
    #[test]
    fn a_truncated_answer_is_an_error() {
        let complete = STATUS.find("\n\nerrors").unwrap() + 2;
        for end in 0..complete {
            assert!(parse_devices("tank", &STATUS[..end]).is_err(), "{end}");
        }
        assert!(parse_devices("tan", STATUS).is_err());
        assert!(parse_devices("tank", &STATUS.replace("FAULTED ", "faulted ")).is_err());
        assert!(parse_devices("tank", &STATUS.replace("\t    sda", "    sda")).is_err());
        assert!(parse_devices("tank", &STATUS.replace("\t    sda  ", "\t    sda x\n")).is_err());
    }

    #[test]
    fn the_line_of_a_pool_must_be_complete_and_of_that_pool() {
        let pool = parse_pool("tank", "tank\t95.5M\t45%\tONLINE\t95.4M\n").unwrap();
        assert_eq!((&pool.health[..], &pool.capacity[..]), ("ONLINE", "45%"));
        assert!(parse_pool("tank", "tank\t-\t-\tFAULTED\t-\n").is_ok());
        for nonsense in [
            "",
            "\n",
            "no pools available\n",
            "tank\t-\t-\tONLINE\t-\n",
            "tank\t95.5M\t45\tONLINE\t95.4M\n",
            "tank\t95.5M\t45%\tONLINE\n",
            "tank\t95.5M\t45%\tON LINE\t95.4M\n",
            "tank\t95.5M\t45%\t\t95.4M\n",
            "tank\t95.5M\t45%\tONLINE\t95.4M\tx\n",
            "bank\t95.5M\t45%\tONLINE\t95.4M\n",
            "tank\t1T\t4%\tONLINE\t1T\ntank\t1T\t4%\tONLINE\t1T\n",
        ] {
            assert!(parse_pool("tank", nonsense).is_err(), "{nonsense:?}");
        }
        let room = parse_space("tank", "tank\t1000\t400\t600\n").unwrap();
        assert_eq!(
            (room.size_bytes, room.allocated_bytes, room.free_bytes),
            (1000, 400, 600)
        );
        assert!(parse_space("tank", "tank\t-\t-\t-\n").is_err());
    }

    #[test]
    fn sizes_are_numbers_with_or_without_a_unit() {
        assert_eq!(bytes_of("12345"), Some(12_345));
        assert_eq!(bytes_of("512B"), Some(512));
        assert_eq!(bytes_of("1.5K"), Some(1536));
        assert_eq!(bytes_of("95.5M"), Some(100_139_008));
        assert_eq!(bytes_of("3.62T"), Some(3_980_232_092_549));
        for nonsense in [
            "",
            "-",
            "K",
            ".5K",
            "5.K",
            "1.2345K",
            "-1",
            "99999E",
            "99999999999999999999E",
            "1 K",
            "x",
            "1é",
        ] {
            assert_eq!(bytes_of(nonsense), None, "{nonsense:?}");
        }
    }
}
