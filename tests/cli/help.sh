reshard --help
reshard plan --help
reshard --version
reshard inspect --help
reshard convert --help
reshard merge --help
reshard split --help
reshard verify --help
reshard diff --help
reshard digest --help
reshard extract --help
reshard uploads --help
reshard -h > one && reshard --help | cmp - one
for verb in inspect convert merge split verify diff digest extract uploads; do
    reshard $verb -h > one || echo "exit $?"
    reshard $verb nosuch --help | cmp - one
done
