fn main() -> std::io::Result<()> {
    std::fs::write(systest::FILE, systest::bindings())
}
