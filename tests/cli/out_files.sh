# Files that the command writes never go through a link, at their own name or at that of their temporary file, and
# what is there stays, unless it is the temporary file of a killed run.
plan='u8[4] : 2:S0 -> 2:R'
echo precious > victim
start() { # what is in the way
    rm -f out.svg out.svg.reshard-part
    echo "# $1"
}
start "a link at the name of the temporary file"
ln -s victim out.svg.reshard-part
try plan "$plan" --no-picture --svg out.svg 2>&1 | tail -n 2
cat victim
start "a link at the name of the file: the link is replaced, not what it leads to"
ln -s victim out.svg
reshard plan "$plan" --no-picture --html out.svg > /dev/null
echo "exit $?"
cat victim
[ -L out.svg ] && echo "still a link"
start "a FIFO at the name of the temporary file"
mkfifo out.svg.reshard-part
try plan "$plan" --no-picture --svg out.svg 2>&1 | tail -n 2
start "a second name of another file"
ln victim out.svg.reshard-part
try plan "$plan" --no-picture --svg out.svg 2>&1 | tail -n 2
cat victim
start "a directory in the way"
mkdir out.svg
try plan "$plan" --no-picture --svg out.svg 2>&1 | tail -n 2
rmdir out.svg
start "what a killed run left"
echo half > out.svg.reshard-part
reshard plan "$plan" --no-picture --svg out.svg > /dev/null
echo "exit $?"
grep -c '</svg>' out.svg
start "another process writes it"
flock_here() { exec 9> out.svg.reshard-part && flock -x 9 && "$@" 9>&-; }
(flock_here try plan "$plan" --no-picture --svg out.svg 2>&1 | tail -n 2)
[ -e out.svg ] || echo "not written"
start "files may not have so many bytes"
(ulimit -f 0; try extract "$GOLDEN/rows_1d/ckpt" w x.npy; try merge -q "$GOLDEN/rows_1d/ckpt" x.safetensors)
ls
rm -r x.*
start "extract to a directory that is a link"
mkdir victims
ln -s victims arrays
try extract --force "$GOLDEN/rows_1d/ckpt" arrays --only .
try extract --force "$GOLDEN/rows_1d/ckpt" arrays/ --only .
ls victims
rmdir victims
rm arrays
echo "# extract"
ln -s "$PWD/victim" w.npy
try extract "$GOLDEN/rows_1d/ckpt" "$(reshard inspect --json "$GOLDEN/rows_1d/ckpt" | sed -n 's/.*"name": "\([^"]*\)".*/\1/p' | head -n 1)" w.npy 2>&1 | tail -n 2
cat victim
try extract --force "$GOLDEN/rows_1d/ckpt" "$(reshard inspect --json "$GOLDEN/rows_1d/ckpt" | sed -n 's/.*"name": "\([^"]*\)".*/\1/p' | head -n 1)" w.npy 2>&1 | tail -n 1
cat victim
[ -L w.npy ] || echo "not a link any more"
ls
