reshard --help
reshard plan --help
reshard --version
