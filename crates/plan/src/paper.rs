//! The cells that the paper prints in Tables 1 and 2, beside those that follow from its parts.

use serde::Serialize;

use crate::rack::{DriveRow, Host, Rack};

/// The racks whose hosts Table 1 shows: with the light and with the heavy IOhost.
const LIGHT: u64 = 3;
const HEAVY: u64 = 6;

/// The counts of parts in Table 1, from the base to the faster NIC, of each of its columns. Cells
/// without a number are 0 here.
const PARTS: [(&str, [u64; 4]); 6] = [
    ("base", [1, 1, 1, 1]),
    ("18 core CPU", [4, 4, 2, 4]),
    ("8GB DRAM", [0, 2, 8, 8]),
    ("16GB DRAM", [18, 26, 0, 0]),
    ("10Gbps NIC DP", [2, 0, 0, 0]),
    ("40Gbps NIC DP", [0, 1, 2, 4]),
];
const COLUMNS: [&str; 4] = ["elvis", "vmhost", "light iohost", "heavy iohost"];
/// The other rows of Table 1, with the unit of their last digit.
const SUMS: [(&str, f64, [f64; 4]); 3] = [
    ("total server price", 100.0, [44_500.0, 47_000.0, 26_000.0, 44_200.0]),
    ("total Gbps", 0.01, [40.0, 80.0, 160.0, 320.0]),
    ("required Gbps", 0.01, [26.72, 40.08, 160.31, 320.63]),
];
/// Table 2: the servers, those of the other setup, the prices, and the second beside the first.
const SETUPS: [(u64, [u64; 2], [f64; 2], f64); 2] =
    [(LIGHT, [2, 1], [133_400.0, 120_000.0], 0.90), (HEAVY, [4, 1], [266_900.0, 232_300.0], 0.87)];
/// The least and the most that vRIO saves in Figure 3.
const SAVES: [f64; 2] = [0.08, 0.38];

/// A cell of a table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// The number of the table.
    pub table: u8,
    /// The row's heading.
    pub row: String,
    /// The column's heading.
    pub column: &'static str,
    /// The printed number.
    pub printed: f64,
    /// The number that follows from the parts.
    pub computed: f64,
    /// The unit of the last digit that is printed.
    pub unit: f64,
}

impl Cell {
    /// The relative difference, without a sign.
    #[must_use]
    pub fn difference(&self) -> f64 {
        if self.printed == self.computed {
            return 0.0;
        }
        (self.computed / self.printed - 1.0).abs()
    }

    /// Whether the parts give another number, to the digits that are printed.
    #[must_use]
    pub fn contradicts(&self) -> bool {
        // An amount that a number in binary may be off.
        const TINY: f64 = 1e-6;
        ((self.computed / self.unit + TINY).round() - self.printed / self.unit).abs() > 0.5
    }
}

/// All cells of both tables.
///
/// `racks` are those of [`PAPER`](crate::file::PAPER).
#[must_use]
pub fn cells(racks: &[Rack]) -> Vec<Cell> {
    let find = |servers| racks.iter().find(|rack| rack.servers == servers);
    let (Some(light), Some(heavy)) = (find(LIGHT), find(HEAVY)) else { return Vec::new() };
    let hosts = [&light.server, &light.vmhost, &light.iohost, &heavy.iohost];
    let mut cells = Vec::new();
    for (index, (column, host)) in COLUMNS.into_iter().zip(hosts).enumerate() {
        let mut add = |row: &str, printed, computed, unit| {
            cells.push(Cell { table: 1, row: row.to_owned(), column, printed, computed, unit });
        };
        for (part, counts) in PARTS {
            let count = host.items.iter().find(|item| item.part == part).map(|item| item.count);
            add(part, counts[index] as f64, count.unwrap_or(0) as f64, 1.0);
        }
        let computed = [host.price, host.gbps, host.required_gbps];
        for ((row, unit, printed), computed) in SUMS.into_iter().zip(computed) {
            add(row, printed[index], computed, unit);
        }
    }
    for ((servers, [vmhosts, iohosts], [elvis, vrio], relative), rack) in
        SETUPS.into_iter().zip([light, heavy])
    {
        let numbers = [
            ("vmhosts", vmhosts as f64, rack.vmhosts as f64, 1.0),
            ("iohosts", iohosts as f64, rack.iohosts as f64, 1.0),
            ("elvis price", elvis, rack.local_price, 100.0),
            ("vrio price", vrio, rack.remote_price, 100.0),
            ("vrio beside elvis", relative, 1.0 + rack.difference, 0.01),
        ];
        cells.extend(numbers.map(|(column, printed, computed, unit)| {
            let row = format!("R930 x {servers}");
            Cell { table: 2, row, column, printed, computed, unit }
        }));
    }
    cells
}

/// The places where the paper's numbers contradict its own parts, a sentence each.
#[must_use]
pub fn contradictions(racks: &[Rack], drives: &[DriveRow]) -> Vec<String> {
    let mut found: Vec<String> = cells(racks).iter().filter_map(contradiction).collect();
    found.push(
        "Section 3: 4 x 18 cores x 380 Mbps are 27.36 Gbps; the printed 26.72 Gbps are 27,360 / \
         1024, 2.3 % less"
            .to_owned(),
    );
    let hosts = racks.iter().flat_map(|rack| [&rack.server, &rack.vmhost, &rack.iohost]);
    found.extend(hosts.filter(|host| host.gbps < host.required_gbps).map(shortfall));
    found.extend(drives.iter().filter_map(outside));
    found
}

fn contradiction(cell: &Cell) -> Option<String> {
    let text = |number: f64| match cell.unit {
        unit if unit >= 100.0 => format!("${:.1}K", number / 1e3),
        unit if unit < 1.0 => format!("{number:.2}"),
        _ => format!("{number:.0}"),
    };
    cell.contradicts().then(|| {
        format!(
            "Table {}, {}, {}: {} is printed, the parts are {} ({}): {:.2} % off",
            cell.table,
            cell.row,
            cell.column,
            text(cell.printed),
            text(cell.computed),
            cell.computed,
            cell.difference() * 100.0
        )
    })
}

fn shortfall(host: &Host) -> String {
    format!(
        "Table 1: an {} needs {:.2} Gbps and has {:.2}: {:.2} % too little",
        host.role,
        // Half a unit is rounded up, as in the paper.
        (host.required_gbps * 100.0).round() / 100.0,
        host.gbps,
        (1.0 - host.gbps / host.required_gbps) * 100.0
    )
}

/// A row of Figure 3 that does not save as much as the paper says with either number of NICs.
fn outside(row: &DriveRow) -> Option<String> {
    let saves = row.relative.map(|relative| ((1.0 - relative.unwrap_or(1.0)) * 100.0).round());
    let [least, most] = SAVES.map(|share| share * 100.0);
    (!saves.iter().any(|saves| (least..=most).contains(saves))).then(|| {
        format!(
            "Figure 3: {}=>{} of {} saves {:.0} % (NICs for the drives: {}), not {least:.0} to \
             {most:.0} %",
            row.servers, row.iohost_drives, row.drive, saves[0], row.nics[0]
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{PAPER, Plan};
    use crate::rack::{racks, with_drives};

    fn paper() -> (Plan, Vec<Rack>) {
        let plan = Plan::parse(PAPER).unwrap();
        let racks = racks(&plan).unwrap();
        (plan, racks)
    }

    #[test]
    fn each_printed_cell_follows_from_the_parts_within_three_in_a_thousand() {
        let (_, racks) = paper();
        let cells = cells(&racks);
        assert_eq!(cells.len(), 4 * 9 + 2 * 5);
        for cell in cells {
            assert!(cell.difference() <= 0.003, "{cell:?}");
            // Counts are equal.
            assert!(cell.unit != 1.0 || cell.printed == cell.computed, "{cell:?}");
        }
    }

    /// The prices that the table prints, and the sums of its parts, calculated by hand.
    #[test]
    fn prices_are_those_of_the_parts() {
        let (_, racks) = paper();
        let [light, heavy] = &racks[..] else { panic!("{racks:?}") };
        let prices = [&light.server, &light.vmhost, &light.iohost, &heavy.iohost];
        assert_eq!(prices.map(|host| host.price), [44_465.0, 46_994.0, 26_037.0, 44_291.0]);
        assert_eq!([light.local_price, light.remote_price], [133_395.0, 120_025.0]);
        assert_eq!([heavy.local_price, heavy.remote_price], [266_790.0, 232_267.0]);
        let parts = [6407.0, 8006.0, 172.0, 273.0, 560.0, 1121.0];
        for (item, price) in light.server.items.iter().zip(parts) {
            assert_eq!(item.price, price, "{item:?}");
        }
        assert_eq!((heavy.vmhost.price, heavy.server.price), (46_994.0, 44_465.0));
    }

    #[test]
    fn two_prices_contradict_the_parts() {
        let (_, racks) = paper();
        let wrong: Vec<Cell> = cells(&racks).into_iter().filter(Cell::contradicts).collect();
        let names: Vec<_> = wrong.iter().map(|cell| (cell.row.as_str(), cell.column)).collect();
        assert_eq!(names, [("total server price", "heavy iohost"), ("R930 x 6", "elvis price")]);
        assert_eq!([wrong[0].computed, wrong[1].computed], [44_291.0, 266_790.0]);
        let text = contradiction(&wrong[0]).unwrap();
        assert!(
            text.contains("$44.2K is printed, the parts are $44.3K (44291): 0.21 % off"),
            "{text}"
        );
    }

    /// Of six drives, as many NICs as their throughput fills give the ends of the printed range.
    #[test]
    fn figure_3_saves_8_to_38_percent_of_six_servers() {
        let (plan, racks) = paper();
        let rows = with_drives(&plan, &racks);
        let saves = |row: &DriveRow| (1.0 - row.relative[1].unwrap()) * 100.0;
        let six = || rows.iter().filter(|row| row.servers == HEAVY).map(saves);
        let (least, most) = (six().fold(100.0, f64::min), six().fold(0.0, f64::max));
        assert_eq!((least.round(), most.round()), (8.0, 38.0), "{least} {most}");
        let nics = |drives| rows.iter().find(|row| row.iohost_drives == drives).unwrap().nics;
        // The paper adds one NIC for three drives, and two for six.
        assert_eq!([nics(1), nics(3), nics(6)], [[1, 0], [1, 0], [2, 1]]);
        let texts = contradictions(&racks, &rows).join("\n");
        assert!(texts.contains("Figure 3: 3=>3 of 6.4TB saves 6 %"), "{texts}");
        assert_eq!(texts.lines().count(), 6, "{texts}");
    }
}
